"""Numbers and types with their words, as all messages have them."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, what: str) -> str:
    """A number with its noun, like ``1 worker`` or ``3,000 workers``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def joined(names: Sequence[str]) -> str:
    """Names as a sentence has them: ``a``, ``a and b``, or ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def typed(value: object) -> str:
    """The type of a value with its article, like ``a str`` or ``an int``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
