"""Hooks that belong to one model, and not to its copies or to files that it is written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zmqtrain.train.compiler import once_there


class OwnHook:
    """Calls ``function``. A copy of the hook does nothing, since a copy of the model does not belong to a replica."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        # The hook waits and checks state; it must not become part of a compiled graph.
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(self, *arguments)
        return self._call(*arguments)

    def _call(self, *arguments: Any) -> Any:
        return None if self._function is None else self._function(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnHook:
        return OwnHook()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (OwnHook, ())


def _uncompiled(hook: OwnHook, *arguments: Any) -> Any:
    return hook._call(*arguments)


def _mark() -> None:
    global _uncompiled
    _uncompiled = torch.compiler.disable(_uncompiled, reason="zmqtrain waits here for parameters")  # type: ignore[no-untyped-call]


once_there(_mark)
