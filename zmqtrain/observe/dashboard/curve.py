"""A curve of any number of points in bounded memory."""

from __future__ import annotations

from typing import Any

#: The most points of a curve, which are also the most that are sent to a page.
MOST_POINTS = 512


class Curve:
    """Means over neighbouring steps: with more steps, more of them share a point. Values may come in any order of steps."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most, self._width = most, 1
        self._bins: dict[int, list[float]] = {}  # bin -> [sum of steps, latest time, sum of values, count]

    def add(self, step: float, at: float, value: float, count: int = 1) -> None:
        """Take ``count`` values with this mean. ``at``: seconds since the run's beginning."""
        self._put(int(step) // self._width, [step * count, at, value * count, count])
        while len(self._bins) > self._most:
            self._width *= 2
            bins, self._bins = self._bins, {}
            for number, row in bins.items():
                self._put(number // 2, row)

    def _put(self, number: int, row: list[float]) -> None:
        there = self._bins.get(number)
        if there is None:
            self._bins[number] = row
        else:
            self._bins[number] = [there[0] + row[0], max(there[1], row[1]), there[2] + row[2], there[3] + row[3]]

    def to_dict(self) -> dict[str, list[Any]]:
        """Steps, times and values of its points, in order of steps."""
        rows = [self._bins[number] for number in sorted(self._bins)]
        return {
            "step": [_short(row[0] / row[3]) for row in rows],
            "at": [round(row[1], 3) for row in rows],
            "value": [_short(row[2] / row[3]) for row in rows],
        }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
