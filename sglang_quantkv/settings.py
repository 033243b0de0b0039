"""What this package's own flags choose. It reaches SGLang's processes through the environment, as they take no others.

=============================  ==============================  ==========================================================
flag of the launcher           variable                        meaning
=============================  ==============================  ==========================================================
``--quantkv-reference``        ``SGLANG_QUANTKV_REFERENCE``    plain torch in place of kernels, to compare with
``--quantkv-extend-from N``    ``SGLANG_QUANTKV_EXTEND_FROM``  from N cached tokens on, a request's new tokens attend to
                                                               packed pages; before, its pages are first dequantized
(for tests)                    ``SGLANG_QUANTKV_TARGET``       whose kernels run; this machine's if unset
=============================  ==============================  ==========================================================
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from sglang_quantkv.errors import UnsupportedConfig

_REFERENCE, _EXTEND_FROM, _TARGET = (f"SGLANG_QUANTKV_{name}" for name in ("REFERENCE", "EXTEND_FROM", "TARGET"))


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        reference: serve with the torch routes on any device.
        extend_from: tokens; None leaves the choice to the machine.
        target: a name of ``kernels.targets``, or None.
    """

    reference: bool = False
    extend_from: int | None = None
    target: str | None = None

    @classmethod
    def from_environment(cls) -> Settings:
        """Raises:
        UnsupportedConfig: for a variable that cannot be read.
        """
        reference = os.getenv(_REFERENCE, "0")
        if reference not in ("0", "1"):
            raise UnsupportedConfig(f"{_REFERENCE}={reference}", "0 or 1", "Unset it, or use --quantkv-reference")
        extend_from = os.getenv(_EXTEND_FROM)
        if extend_from is not None and not extend_from.isdecimal():
            raise UnsupportedConfig(
                f"{_EXTEND_FROM}={extend_from}",
                "a number of tokens, 0 and up",
                "Unset it, or use --quantkv-extend-from",
            )
        return cls(reference == "1", None if extend_from is None else int(extend_from), os.getenv(_TARGET))

    def export(self) -> None:
        """Into the environment of this process and of those that it starts."""
        values = {
            _REFERENCE: "1" if self.reference else None,
            _EXTEND_FROM: None if self.extend_from is None else str(self.extend_from),
            _TARGET: self.target,
        }
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
