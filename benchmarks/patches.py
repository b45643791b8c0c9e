"""Functions of the package, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any


class Patches:
    """Replaces functions by name, and puts them back."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def around(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(what it was)``. Raises `KeyError` if it has no such thing of its own."""
        before = vars(owner)[name]
        self._undo.append((owner, name, before))
        made = make(before.fget if isinstance(before, property) else before)
        setattr(owner, name, property(made) if isinstance(before, property) else made)

    def undo(self) -> None:
        """Put all back."""
        while self._undo:
            setattr(*self._undo.pop())


def every(number: int) -> Callable[[], bool]:
    """A function that is true every ``number``-th time."""
    calls = count(1)
    return lambda: next(calls) % number == 0
