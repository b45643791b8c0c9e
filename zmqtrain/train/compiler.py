"""torch's compiler, imported when something is compiled.

torch imports its compiler (``torch._dynamo``: a second of processor time and 70 MB) at a process's first optimizer, whether or not
anything is ever compiled: it marks functions of optimizers as not to be compiled. `postpone` puts a stand-in into the compiler's
place, which does what these marks do where nothing is compiled, which is nothing. Any other use of it imports the compiler, and
from then on all is as torch has made it.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
#: Where torch keeps what the mark has made of a function (`torch._compile`).
_KEPT = "__dynamo_disable"


class _StandIn(ModuleType):
    """In the compiler's place, until anything but a mark is needed."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        spec = find_spec(_NAME)
        self.__file__ = None if spec is None else spec.origin  # `inspect` asks all modules for theirs
        self._importing = threading.RLock()
        self._marked: list[Callable[..., Any]] = []
        self._waiting: list[Callable[[], None]] = []

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: a graph that is not compiled cannot be broken."""

    def disable(
        self, fn: Callable[..., Any] | None = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True
    ) -> Any:
        """What `torch._disable_dynamo` calls a function by from its first call on: itself. Any other caller gets the compiler's."""
        if fn is None or wrapping:
            return self._compiler().disable(fn, recursive, reason=reason, wrapping=wrapping)
        with self._importing:
            if sys.modules.get(_NAME) is not self:
                return self._compiler().disable(fn, recursive, reason=reason, wrapping=wrapping)
            self._marked.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler(), name)

    def _compiler(self) -> Any:
        """Import the compiler, if it is not there yet."""
        with self._importing:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
                vars(torch).pop("_dynamo", None)
                importlib.import_module(_NAME)
                for function in self._marked:
                    vars(function).pop(_KEPT, None)  # torch now marks it itself
                for call in self._waiting:
                    call()
        return sys.modules[_NAME]


def postpone() -> None:
    """Put the stand-in into the compiler's place, if nothing has imported the compiler yet."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = torch._dynamo = _StandIn()


def once_there(call: Callable[[], None]) -> None:
    """Call ``call`` as soon as the compiler is imported, or now if it is not postponed."""
    compiler = sys.modules.get(_NAME)
    if isinstance(compiler, _StandIn):
        compiler._waiting.append(call)
    else:
        call()
