"""Numbers with their nouns, as all messages have them."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """A number with its noun, like ``1 worker`` or ``3,000 workers``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
