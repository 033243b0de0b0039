"""What a hook into SGLang is: a target, and a card that says why it exists and what would end it.

SGLang logs and swallows an exception while it applies a hook, so a hook that did not take effect leaves
a server that looks healthy. ``missing_hooks`` finds those; the hook that resolves our dtype and the
launcher both refuse to go on when there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """A function put before, after or around one of SGLang's.

    Attributes:
        target: dotted path of the function or method.
        kind: "after" (``fn(result, *args)``) or "around" (``fn(original, *args)``).
        fn: the hook.
        why: what goes wrong without it.
        until: what would make it unnecessary.
    """

    target: str
    kind: str
    fn: Callable
    why: str
    until: str


def register_hooks(hooks: Iterable[Hook]) -> None:
    """Hands the hooks to SGLang, which applies them after every plugin has registered."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.fn, HookType(hook.kind))


def missing_hooks(hooks: Iterable[Hook]) -> list[Hook]:
    """The hooks that SGLang did not apply in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [hook for hook in hooks if hook.target not in HookRegistry._patched]
