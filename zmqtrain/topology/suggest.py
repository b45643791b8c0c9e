"""Did you mean ...?"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

#: What people call CUDA devices. It is no slip for "cpu", though one letter away.
_GPU = re.compile(r"gpus?(:\d+)?|nvidia")


def did_you_mean(given: str, known: Iterable[str]) -> str | None:
    """The known word that means what was given, or is nearest to it, if one is near."""
    by_lower: dict[str, str] = {}
    for word in known:
        other = by_lower.setdefault(word.lower(), word)
        if other != word:  # they differ in case alone: the nearer one as it is written
            by_lower[word.lower()] = max(other, word, key=lambda each: difflib.SequenceMatcher(None, given, each).ratio())
    if _GPU.fullmatch(given.lower().strip()):
        if "cuda" in by_lower:
            return by_lower["cuda"]
        by_lower = {lower: word for lower, word in by_lower.items() if not lower.startswith("cpu")}
    near = difflib.get_close_matches(given.lower().strip(), by_lower, n=1, cutoff=0.6)
    if near:
        return by_lower[near[0]]
    # A word that a known one begins with, or that begins with a known one: "async" for "asynchronous".
    word = given.lower()
    starts = [known for lower, known in by_lower.items() if len(word) >= 3 and (lower.startswith(word) or word.startswith(lower))]
    return starts[0] if len(starts) == 1 else None
