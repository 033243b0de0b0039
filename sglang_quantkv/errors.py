"""The one exception that user input raises."""

from collections.abc import Mapping


class UnsupportedConfig(ValueError):
    """A request this build cannot honour.

    Args:
        asked: what the user asked for, with the flag and its value.
        supported: what is possible instead.
        advice: what to do, as an imperative sentence.
    """

    def __init__(self, asked: str, supported: str, advice: str):
        self.asked, self.supported, self.advice = asked, supported, advice
        super().__init__(f"sglang_quantkv: {asked}. Supported: {supported}. {advice}.")


def refuse_first(found: Mapping[str, bool], supported: str, advice: str) -> None:
    """Raises:
    UnsupportedConfig: for the first thing asked that was found; keys are ``UnsupportedConfig.asked``.
    """
    for asked, is_found in found.items():
        if is_found:
            raise UnsupportedConfig(asked, supported, advice)
