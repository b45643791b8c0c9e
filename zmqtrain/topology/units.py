"""Quantities as users write them: ``"60 s"``, ``"4 MiB"``, ``"1 Gbit/s"``; read to plain numbers and written back.

Every reader takes a bare number too, in the base unit (seconds, bytes, bits per second), and raises ``ValueError``, which says
what is allowed. Numbers are read exactly where a unit is a power of two, so that writing and reading again gives the same value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\s\d].*?)?\s*")

_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SIZES = {
    **{"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
}
_RATES = {
    **{"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "Tbit/s": 1e12},
    **{"B/s": 8.0, "kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9, "KiB/s": 8 * 2.0**10, "MiB/s": 8 * 2.0**20, "GiB/s": 8 * 2.0**30},
}


@dataclass(frozen=True, slots=True, eq=False)  # hashed by identity: pydantic hashes validators, and tables are not hashable
class Quantity:
    """A kind of quantity, with its units and the range that is allowed for one setting. Calling it reads a value."""

    noun: str
    units: Mapping[str, float]
    low: float
    high: float
    example: str
    write: Callable[[float], str]

    def __call__(self, value: object) -> float:
        """The value in the base unit. Raises ``ValueError``, which says what is allowed."""
        number = self._read(value)
        if not self.low <= number <= self.high:
            raise ValueError(f"is out of range: give a {self.noun} from {self.write(self.low)} to {self.write(self.high)}")
        return number

    def _read(self, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"is not a {self.noun}: write it like {self.example!r}")
            return _as_float(value)
        if not isinstance(value, str):
            raise ValueError(f"is not a {self.noun}: write it like {self.example!r}")
        match = _QUANTITY.fullmatch(value)
        if match is None:
            raise ValueError(f"is not a {self.noun}: write it like {self.example!r}")
        unit = match[2]
        if unit is None:
            raise ValueError(f"has no unit: write it like {self.example!r}, with one of {', '.join(self.units)}")
        if unit not in self.units:
            raise ValueError(f"has the unknown unit {unit!r}: use one of {', '.join(self.units)}")
        return _times(_as_float(match[1]), self.units[unit])


def _as_float(value: int | float | str) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def _times(number: float, unit: float) -> float:
    """``number`` times a unit; parts of a second are divided by, so that 200 us is the float nearest to 0.0002."""
    return number * unit if unit >= 1 else number / round(1 / unit)


def _scaled(value: float, units: Mapping[str, float], names: tuple[str, ...], fallback: str) -> str:
    """``value`` in the first unit of ``names`` in which it is a short whole number and reads back as the same value."""
    for name in names:
        number = value / units[name]
        if number >= 1 and number == int(number) and int(number) * units[name] == value:
            return f"{int(number)} {name}"
    return f"{value:.0f} {fallback}" if value == int(value) else f"{value!r} {fallback}"


def format_duration(seconds: float) -> str:
    """Like ``"60 s"``, ``"24 h"`` or ``"200 us"``; reads back to exactly the same number."""
    for name in ("h", "s", "ms", "us"):
        number = round(seconds / _TIMES[name], 6)
        if number == int(number) and number >= 1 and _times(int(number), _TIMES[name]) == seconds:
            return f"{int(number)} {name}"
    return f"{seconds!r} s" if seconds else "0 s"


def format_size(size: float) -> str:
    """A number of bytes in the form of a topology file, like ``"4 MiB"``."""
    return _scaled(size, _SIZES, ("GiB", "MiB", "KiB"), "B")


def format_rate(rate: float) -> str:
    """A rate in the form of a topology file, like ``"1 Gbit/s"``."""
    return _scaled(rate, _RATES, ("Gbit/s", "Mbit/s", "kbit/s"), "bit/s")


def duration(low: float, high: float) -> Quantity:
    """A time from ``low`` to ``high`` seconds."""
    return Quantity("time", _TIMES, low, high, "60 s", format_duration)


def rate(low: float, high: float) -> Quantity:
    """A bandwidth from ``low`` to ``high`` bits per second."""
    return Quantity("bandwidth", _RATES, low, high, "1 Gbit/s", format_rate)


def size(low: int, high: int) -> Callable[[object], int]:
    """A number of bytes from ``low`` to ``high``; the reader returns an ``int``."""
    quantity = Quantity("size", _SIZES, low, high, "4 MiB", format_size)

    def read(value: object) -> int:
        number = quantity(value)
        if number != int(number):
            raise ValueError("is not a whole number of bytes")
        return int(number)

    return read
