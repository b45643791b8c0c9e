"""Did you mean ...?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str]) -> str | None:
    """The known word nearest to what was given, if one is near."""
    by_lower = {word.lower(): word for word in known}
    near = difflib.get_close_matches(given.lower().strip(), by_lower, n=1, cutoff=0.6)
    if near:
        return by_lower[near[0]]
    # A word that a known one begins with, or that begins with a known one: "async" for "asynchronous".
    word = given.lower()
    starts = [known for lower, known in by_lower.items() if len(word) >= 3 and (lower.startswith(word) or word.startswith(lower))]
    return starts[0] if len(starts) == 1 else None
