"""A rule between fields that a topology breaks, as the modules of rules report it."""

from __future__ import annotations

from dataclasses import dataclass

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """``message`` is about the field ``path``; ``involves`` are all fields it follows from, ``path`` among them."""

    path: Path
    message: str
    involves: tuple[Path, ...]
    suggestion: str | None = None
    """What may have been meant."""


def rule(message: str, path: Path, *others: Path, suggestion: str | None = None) -> BrokenRule:
    """A broken rule about ``path`` that follows from it and from ``others``."""
    return BrokenRule(path, message, (path, *others), suggestion)
