"""Tests on virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from zmqtrain.simulate.clock import run_virtual

P = ParamSpec("P")
T = TypeVar("T")


def virtual_time(*, seed: int = 0, limit_s: float = math.inf) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, T]]:
    """A decorator: run the coroutine function on virtual time (`run_virtual`), as a plain function that any test runner calls.

    A wait that would hang fails at once with `zmqtrain.errors.DeadlockError`, which says which process waits for what.
    """

    def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            return run_virtual(function(*args, **kwargs), seed=seed, limit_s=limit_s)

        return run

    return decorate
