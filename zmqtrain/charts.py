"""Panels one below the other as one self-contained SVG: stacked bars, and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from zmqtrain import svg

BAR, GAP, HEIGHT, LEFT, TOP, BOTTOM = 22, 8, 220, 64, 46, 74
#: The least width of a picture, and how much of the right edge stays free.
LEAST, EDGE = 520, 24
_HEAD = 28
_LETTER = 6.4  # pixels of an average letter, at most

#: Writes a value for an axis.
Format: TypeAlias = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of several parts."""

    label: str
    parts: Mapping[str, float]
    """Their sizes by their names."""
    marked: bool = False
    """Whether it has a star, as the best of its panel."""


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars side by side, on a scale of their own."""

    title: str
    bars: tuple[Bar, ...]
    colours: Mapping[str, str]
    """The parts from the bottom up, with their colours."""
    words: Format


@dataclass(frozen=True, slots=True)
class Curve:
    """Points that a line joins."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    """Values that are not finite are left out."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves over the same axes."""

    title: str
    below: str
    """What the horizontal axis shows."""
    curves: tuple[Curve, ...]
    words: Format
    colours: Mapping[str, str] = field(default_factory=dict)
    """By the curves' labels; others take the usual ones in turn."""
    from_zero: bool = False


def draw(title: str, panels: Sequence[Bars | Curves]) -> svg.Picture:
    """Draw panels below each other, under a title. Returns the picture."""
    bars = [LEFT + len(panel.bars) * (BAR + GAP) + EDGE for panel in panels if isinstance(panel, Bars)]
    titles = [LEFT + math.ceil(_LETTER * len(panel.title)) + EDGE for panel in panels]
    width, y = max([LEAST, *bars, *titles]), float(_HEAD)
    parts = [svg.text(LEFT, 18, title, bold=True, size=14)]
    for panel in panels:
        drawn, height = _bars(panel, y) if isinstance(panel, Bars) else _curves(panel, y, width)
        parts += drawn
        y += height
    return svg.picture(title, width, y, parts, font_size=11)


def _heading(title: str, entries: Sequence[tuple[str, str]], y: float) -> list[str]:
    """A panel's title, and below it names with their colours."""
    parts, x = [svg.text(LEFT, y + 14, title, bold=True)], float(LEFT)
    for name, colour in entries:
        parts.append(svg.colour_key(x, y + 32, colour, name))
        x += 28 + _LETTER * len(name)
    return parts


def _bars(panel: Bars, y: float) -> tuple[list[str], float]:
    most = max((sum(bar.parts.values()) for bar in panel.bars), default=0.0) or 1.0
    frame = svg.Frame(LEFT, y + TOP, LEFT + len(panel.bars) * (BAR + GAP), y + TOP + HEIGHT)
    used = [(name, colour) for name, colour in panel.colours.items() if any(bar.parts.get(name) for bar in panel.bars)]
    parts = _heading(panel.title, used, y)
    parts += frame.levels((share, panel.words(most * share)) for share in svg.QUARTERS)
    for place, bar in enumerate(panel.bars):
        parts += _bar(bar, LEFT + GAP / 2 + place * (BAR + GAP), frame, most, panel)
    below = 14 + math.ceil(0.87 * _LETTER * max((len(bar.label) for bar in panel.bars), default=0))  # they are turned
    return parts, TOP + HEIGHT + max(BOTTOM, below)


def _bar(bar: Bar, x: float, frame: svg.Frame, most: float, panel: Bars) -> list[str]:
    top, parts, middle = float(frame.bottom), [], x + BAR / 2
    for name, colour in panel.colours.items():
        value = bar.parts.get(name, 0.0)
        if value > 0:
            height = value / most * HEIGHT
            top -= height
            parts.append(svg.bar(x, top, BAR, height, colour, says=f"{bar.label}: {name} {panel.words(value)}"))
    if bar.marked:
        parts.append(svg.text(middle, top - 4, "*", "middle"))
    return [*parts, svg.text(middle + 4, frame.bottom + 8, bar.label, "end", bold=bar.marked, turned=-60)]


def _curves(panel: Curves, y: float, width: float) -> tuple[list[str], float]:
    curves = [_finite(curve) for curve in panel.curves]
    xs = [x for _, points in curves for x, _ in points]
    ys = [value for _, points in curves for _, value in points]
    (left, right), (low, high) = _range(xs), _range([*ys, 0.0] if panel.from_zero else ys)
    frame = svg.Frame(LEFT, y + TOP, width - EDGE, y + TOP + HEIGHT)
    ways = [panel.colours.get(name, svg.COLOURS[place % len(svg.COLOURS)]) for place, (name, _) in enumerate(curves)]
    shown = [(name, colour) for (name, points), colour in zip(curves, ways, strict=True) if points]
    parts = _heading(panel.title, shown if len(shown) > 1 else [], y)
    parts += frame.levels((share, panel.words(low + share * (high - low))) for share in svg.QUARTERS)
    for (_, points), colour in zip(curves, ways, strict=True):
        at = [(frame.x((x - left) / (right - left)), frame.y((value - low) / (high - low))) for x, value in points]
        parts += [svg.dot(*at[0], colour)] if len(at) == 1 else [svg.curve(at, colour)] if at else []
    ends = ((0.0, left, "start"), (1.0, right, "end")) if xs else ()
    parts += [svg.text(frame.x(share), frame.bottom + 16, f"{value:,.6g}", anchor) for share, value, anchor in ends]
    return [*parts, svg.text(frame.x(0.5), frame.bottom + 16, panel.below, "middle")], TOP + HEIGHT + 38


def _finite(curve: Curve) -> tuple[str, list[tuple[float, float]]]:
    return curve.label, [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest, which differ."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5 * abs(low), high + 0.5 * abs(high)) if low else (0.0, 1.0)
