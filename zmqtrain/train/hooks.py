"""Hooks that belong to one model: its copies, and files it is written to, do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OwnHook:
    """Calls ``function``. A copy does nothing: it hangs on a copy of the module, which is nobody's replica."""

    # What torch.compiler.disable sets: a compiled model calls the hook as it is, for what it does is no part of a graph.
    _torchdynamo_disable = True

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return None if self._function is None else self._function(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnHook:
        return OwnHook()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (OwnHook, ())
