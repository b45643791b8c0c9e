"""Ranges of names: ``node[01-16]`` stands for 16 hosts, ``10.0.0.[1-16]`` for 16 addresses."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: More hosts than any file needs, and few enough that a typing mistake does not fill the memory.
MOST_HOSTS = 65_536

#: The most digits of a number in a range.
MOST_DIGITS = 9

_RANGE = re.compile(r"([^\[\]]*)\[([0-9]{1,9})-([0-9]{1,9})\]([^\[\]]*)")
_NUMBER = re.compile(r"(.*?)([0-9]{1,9})([^0-9\[\]]*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Range:
    """A parsed range: the text before the number, the first and last number, the minimal number of digits, and the text after
    it.
    """

    head: str
    first: int
    last: int
    digits: int
    tail: str

    def __len__(self) -> int:
        return self.last - self.first + 1

    def name(self, number: int) -> str:
        return f"{self.head}{number:0{self.digits}d}{self.tail}"


def expand(text: str) -> tuple[str, ...]:
    """All names of a range, in order, with zeros in front where the range has them; a plain name alone.

    Raises ``ValueError``, saying what is allowed, for brackets that do not contain a range, for several ranges, and for a range
    that runs backwards, pads its two ends differently or is longer than `MOST_HOSTS`.
    """
    found = _read(text)
    return (text,) if found is None else tuple(map(found.name, range(found.first, found.last + 1)))


def count(text: str) -> int:
    """The number of names that `expand` gives, without making them. Raises like `expand`."""
    found = _read(text)
    return 1 if found is None else len(found)


def last(text: str) -> str:
    """The last, and longest, name that `expand` gives. Raises like `expand`."""
    found = _read(text)
    return text if found is None else found.name(found.last)


def ahead(name: str, places: int) -> str | None:
    """The name ``places`` places after ``name`` in a range that begins with it; ``None`` if no range can begin with it."""
    parts = _parts(name)
    if parts is None:
        return None
    head, first, tail = parts
    number = f"{int(first) + places:0{len(first)}d}"
    if len(number) > MOST_DIGITS or (len(number) > len(first) and _padded(first)):
        return None
    return f"{head}{number}{tail}"


def between(first: str, last: str) -> str:
    """The range from ``first`` to ``last``; ``last`` must be `ahead` of ``first``."""
    low, high = _parts(first), _parts(last)
    assert low is not None
    assert high is not None
    return f"{low[0]}[{low[1]}-{high[1]}]{low[2]}"


def _parts(name: str) -> tuple[str, str, str] | None:
    """The text before a name's last number, the digits of the number, and the text after it."""
    match = _NUMBER.fullmatch(name)
    return None if match is None else (match[1], match[2], match[3])


def _padded(digits: str) -> bool:
    return len(digits) > 1 and digits[0] == "0"


def _read(text: str) -> _Range | None:
    if "[" not in text and "]" not in text:
        return None
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError('is not a range of names: write one like "node[01-16]"')
    head, low, high, tail = match.groups()
    found = _Range(head, int(low), int(high), len(low), tail)
    if found.last < found.first:
        raise ValueError(f"is a range that runs backwards: write {head}[{high}-{low}]{tail}")
    if len(found) > MOST_HOSTS:
        raise ValueError(f"is a range of {len(found):,} names, but at most {MOST_HOSTS:,} are allowed")
    if len(low) != len(high) and (_padded(low) or _padded(high)):
        digits = max(len(low), len(high))
        raise ValueError(f"has leading zeros at one end only: write {head}[{low.zfill(digits)}-{high.zfill(digits)}]{tail}")
    return found
