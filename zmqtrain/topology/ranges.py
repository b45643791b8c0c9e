"""Host ranges: ``node[01-16]`` is as many names, ``10.0.0.[1-16]`` as many addresses."""

from __future__ import annotations

import re

#: More hosts than any file needs, and few enough that a slip of the pen does not fill the memory.
MOST_HOSTS = 65_536

_RANGE = re.compile(r"\[(\d{1,9})-(\d{1,9})\]")


def expand(text: str) -> tuple[str, ...]:
    """All names of a range, in order, with the zeros that the first number begins with; a plain name alone.

    Raises ``ValueError`` for brackets that are no range, for two of them, for one that runs backwards or is too long.
    """
    match = _RANGE.search(text)
    rest = text if match is None else text[: match.start()] + text[match.end() :]
    if "[" in rest or "]" in rest:
        raise ValueError('is no range of names: write one like "node[01-16]"')
    if match is None:
        return (text,)
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise ValueError(f"is a range that runs backwards, from {first} to {last}")
    if last - first >= MOST_HOSTS:
        raise ValueError(f"is a range of {last - first + 1} names; there may be {MOST_HOSTS}")
    width = len(match[1])
    head, tail = text[: match.start()], text[match.end() :]
    return tuple(f"{head}{number:0{width}d}{tail}" for number in range(first, last + 1))
