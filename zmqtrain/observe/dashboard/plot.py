"""Curves, drawn with a terminal's characters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from zmqtrain.observe.terminal import brief, duration, harmless

#: What curves are drawn over: the run's steps, or the seconds since it began.
Axis: TypeAlias = Literal["step", "at"]
#: Columns for the figures beside the picture.
_MARGIN = 10
#: The first of the characters that show any of 2 by 4 dots, and the dots' bits in it by row and column.
_BRAILLE, _DOTS = 0x2800, ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True, slots=True)
class Series:
    """One curve (`zmqtrain.observe.dashboard.curve.Curve.to_dict`) with its name and colour."""

    label: str
    curve: dict[str, list[Any]]
    colour: str


class Plot:
    """A heading with the newest values, and the curves below it; as wide as the console."""

    def __init__(
        self, title: str, series: Sequence[Series], axis: Axis, form: Callable[[float | None], str] = brief, *, height: int = 8
    ) -> None:
        """``height``: lines of the picture, without the heading and the axis."""
        self._title, self._axis, self._form, self._height = title, axis, form, height
        self._series = [each for each in series if each.curve["value"]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heading = Text(self._title, style="bold")
        for each in self._series:
            heading.append("  ").append(f"{harmless(each.label)} {self._form(each.curve['value'][-1])}", style=each.colour)
        yield heading
        if not self._series:
            yield Text("nothing has been recorded", style="dim")
            return
        yield from self._picture(max(1, options.max_width - _MARGIN), plain=options.ascii_only)

    def _picture(self, width: int, *, plain: bool) -> Iterator[Text]:
        across, down = (1, 1) if plain else (2, 4)
        columns, rows = width * across, self._height * down
        xs = [x for each in self._series for x in each.curve[self._axis]]
        ys = [y for each in self._series for y in each.curve["value"]]
        left, right, low, high = min(xs), max(xs), min(ys), max(ys)
        cells: dict[tuple[int, int], tuple[int, str]] = {}
        for each in self._series:
            points = sorted(zip(each.curve[self._axis], each.curve["value"], strict=True))
            at = [(_place(x, left, right, columns), rows - 1 - _place(y, low, high, rows)) for x, y in points]
            for column, row in _joined(at):
                cell = row // down, column // across
                bits = cells.get(cell, (0, ""))[0] | (1 if plain else _DOTS[row % down][column % across])
                cells[cell] = bits, each.colour
        for row in range(self._height):
            beside = high if row == 0 else low if row == self._height - 1 and high > low else None
            line = Text(f"{'' if beside is None else self._form(beside):>{_MARGIN - 1}} ", style="dim", no_wrap=True)
            for column in range(width):
                bits, colour = cells.get((row, column), (0, ""))
                line.append((" " if not bits else "*" if plain else chr(_BRAILLE + bits)), style=f"not dim {colour}".strip())
            yield line
        first, last = (f"{brief(x)}" if self._axis == "step" else duration(x) for x in (left, right))
        yield Text(
            f"{'step' if self._axis == 'step' else 'after':>{_MARGIN - 1}} {first}{last:>{max(1, width - len(first))}}",
            "dim",
            no_wrap=True,
        )


def _place(value: float, low: float, high: float, count: int) -> int:
    """Which of ``count`` places from ``low`` to ``high`` a value has."""
    return round((value - low) / (high - low) * (count - 1)) if high > low else 0


def _joined(points: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The dots of the lines from each point to the next."""
    yield from points[:1]
    for (x, y), (to_x, to_y) in pairwise(points):
        count = max(abs(to_x - x), abs(to_y - y), 1)
        for part in range(1, count + 1):
            yield x + round((to_x - x) * part / count), y + round((to_y - y) * part / count)
