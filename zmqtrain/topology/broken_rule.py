"""A broken rule between fields of a topology, as the rules modules report it."""

from __future__ import annotations

from dataclasses import dataclass

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """``message`` is about the field ``path``; ``involves`` lists all fields that the rule depends on, including ``path``."""

    path: Path
    message: str
    involves: tuple[Path, ...]
    suggestion: str | None = None
    """The word that the user may have meant."""


def rule(message: str, path: Path, *others: Path, suggestion: str | None = None) -> BrokenRule:
    """A broken rule about ``path`` that depends on ``path`` and ``others``."""
    return BrokenRule(path, message, (path, *others), suggestion)
