"""Quantities rounded for display: three digits and a suitable unit. `units` writes those that must read back exactly."""

from __future__ import annotations

from collections.abc import Sequence

_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
#: Less than this many seconds is nothing.
LEAST_S = 1e-11
_SIZES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
_AMOUNTS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1.0))
_RATES = (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))


def rounded_time(seconds: float) -> str:
    """Like ``"1.23 ms"``; zero, and what rounding of sums has left of it, is ``"0"``."""
    return _rounded(seconds, _TIMES) if abs(seconds) >= LEAST_S else "0"


def rounded_duration(seconds: float) -> str:
    """As people say how long something takes: like ``"830 ms"``, ``"4.6 s"``, ``"75 s"``, ``"12 min"`` or ``"3 h 5 min"``."""
    if seconds < 0.9995:
        return rounded_time(max(0.0, seconds))
    if seconds < 119.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = int(seconds / 60 + 0.5)
    hours, rest = divmod(minutes, 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{hours:,} h {rest} min" if rest else f"{hours:,} h"


def rounded_size(nbytes: float) -> str:
    """A number of bytes as text for people, like ``"244 MiB"``."""
    return _rounded(nbytes, _SIZES)


def rounded_amount(nbytes: float) -> str:
    """Like ``"256 MB"``: of what travels, in the units of the dashboard's page."""
    return _rounded(nbytes, _AMOUNTS)


def rounded_rate(bits_per_s: float) -> str:
    """A rate as text for people, like ``"941 Mbit/s"``."""
    return _rounded(bits_per_s, _RATES)


def _rounded(value: float, units: Sequence[tuple[str, float]]) -> str:
    """``value`` in the largest unit in which it is at least 1 after rounding, or else in the smallest."""
    if value < 0:
        return f"-{_rounded(-value, units)}"
    name, factor = next(((name, factor) for name, factor in units if value >= 0.9995 * factor), units[-1])
    number = value / factor
    return f"{number:,.0f} {name}" if number >= 99.95 else f"{number:.3g} {name}"
