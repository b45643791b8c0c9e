"""Suggestions for misspelt words: "did you mean ...?"."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

#: Common names for CUDA devices. "gpu" is not a typing mistake for "cpu", though one letter away.
_GPU = re.compile(r"gpus?(:\d+)?|nvidia")


def did_you_mean(given: str, known: Iterable[str]) -> str | None:
    """The word of ``known`` that ``given`` probably means; ``None`` if none is similar."""
    by_lower: dict[str, str] = {}
    for word in known:
        other = by_lower.setdefault(word.lower(), word)
        if other != word:  # the words differ only in case: take the closer one as it is written
            by_lower[word.lower()] = max(other, word, key=lambda each: difflib.SequenceMatcher(None, given, each).ratio())
    if _GPU.fullmatch(given.lower().strip()):
        if "cuda" in by_lower:
            return by_lower["cuda"]
        by_lower = {lower: word for lower, word in by_lower.items() if not lower.startswith("cpu")}
    near = difflib.get_close_matches(given.lower().strip(), by_lower, n=1, cutoff=0.6)
    if near:
        return by_lower[near[0]]
    # One word is the beginning of the other, like "async" and "asynchronous".
    word = given.lower()
    starts = [known for lower, known in by_lower.items() if len(word) >= 3 and (lower.startswith(word) or word.startswith(lower))]
    return starts[0] if len(starts) == 1 else None
