"""Slurm's lists of nodes: ``n[1-3,07],gpu5`` stands for five names."""

from __future__ import annotations

from collections.abc import Iterator

from zmqtrain.topology import ranges


def expand_node_list(text: str) -> tuple[str, ...]:
    """All names of a list, in order. Raises ``ValueError``, which says what is wrong, if ``text`` is not a list of nodes."""
    names = [name for part in _parts(text, text) for name in _names(part, text)]
    if not names:
        raise ValueError("is an empty list of nodes")
    return tuple(names)


def _parts(text: str, whole: str) -> Iterator[str]:
    """The parts between commas that are outside brackets."""
    start, depth = 0, 0
    for place, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f"has unmatched brackets: {whole!r}")
        if character == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    if depth:
        raise ValueError(f"has unmatched brackets: {whole!r}")
    if text:
        yield text[start:]


def _names(part: str, whole: str) -> Iterator[str]:
    """The names of one entry, whose brackets contain numbers and ranges of numbers."""
    head, bracket, rest = part.partition("[")
    if not bracket:
        if not part.strip():
            raise ValueError(f"has an empty place: {whole!r}")
        yield part.strip()
        return
    inner, _, tail = rest.partition("]")
    for item in inner.split(","):
        if "-" in item:
            middle = ranges.expand(f"[{item}]")
        elif item.isdecimal():
            middle = (item,)
        else:
            raise ValueError(f"has {item!r} where a number should be: {whole!r}")
        for number in middle:
            # Several pairs of brackets mean all combinations.
            yield from _names(f"{head.strip()}{number}{tail}", whole)
