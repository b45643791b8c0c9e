"""Stacked bars as one self-contained SVG: the parts of a step under each plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zmqtrain import svg
from zmqtrain.topology.rounded import rounded_time

#: Segments from the bottom up, with their colours (of Okabe and Ito, for colour-blind readers).
COLOURS: Mapping[str, str] = {
    "compute": "#bbbbbb",
    "all-gather": "#0072b2",
    "dX": "#56b4e9",
    "dW": "#d55e00",
    "halo": "#009e73",
    "redistribute": "#f0e442",
    "statistics": "#cc79a7",
}
BAR, GAP, HEIGHT, LEFT, TOP, BOTTOM = 22, 8, 220, 64, 46, 74


@dataclass(frozen=True, slots=True)
class Bar:
    """One plan."""

    label: str
    seconds: Mapping[str, float]
    """Seconds by the names in `COLOURS`."""
    marked: bool = False
    """Whether it is the best of its panel."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Plans side by side, on a scale of their own."""

    title: str
    bars: tuple[Bar, ...]


def draw(title: str, panels: Sequence[Panel]) -> str:
    """The SVG as text."""
    width = max(520, *(LEFT + len(panel.bars) * (BAR + GAP) + 24 for panel in panels))
    each = TOP + HEIGHT + BOTTOM
    used = [name for name in COLOURS if any(bar.seconds.get(name) for panel in panels for bar in panel.bars)]
    parts = [svg.text(LEFT, 18, title, bold=True, size=14)]
    parts += [svg.colour_key(LEFT + place * 84, 35, COLOURS[name], name) for place, name in enumerate(used)]
    for index, panel in enumerate(panels):
        parts += _panel(panel, 40 + index * each)
    return svg.picture(title, width, 40 + each * len(panels), parts, font_size=11)


def _panel(panel: Panel, y: int) -> list[str]:
    most = max((sum(bar.seconds.values()) for bar in panel.bars), default=0.0) or 1.0
    frame = svg.Frame(LEFT, y + TOP, LEFT + len(panel.bars) * (BAR + GAP), y + TOP + HEIGHT)
    parts = [svg.text(LEFT, y + 26, panel.title, bold=True)]
    parts += frame.levels((share, rounded_time(most * share)) for share in svg.QUARTERS)
    for place, bar in enumerate(panel.bars):
        parts += _bar(bar, LEFT + GAP / 2 + place * (BAR + GAP), frame, most)
    return parts


def _bar(bar: Bar, x: float, frame: svg.Frame, most: float) -> list[str]:
    top, parts, middle = float(frame.bottom), [], x + BAR / 2
    for name, colour in COLOURS.items():
        seconds = bar.seconds.get(name, 0.0)
        if seconds > 0:
            height = seconds / most * HEIGHT
            top -= height
            parts.append(svg.bar(x, top, BAR, height, colour, says=f"{bar.label}: {name} {rounded_time(seconds)}"))
    if bar.marked:
        parts.append(svg.text(middle, top - 4, "*", "middle"))
    return [*parts, svg.text(middle + 4, frame.bottom + 8, bar.label, "end", bold=bar.marked, turned=-60)]
