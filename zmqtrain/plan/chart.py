"""Stacked bars as one self-contained SVG: what a step of each plan consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from zmqtrain.topology.rounded import rounded_time

#: Segments from the bottom up, with their colours (Okabe and Ito's, which the colour-blind can tell apart).
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
    """By the names in `COLOURS`."""
    marked: bool = False
    """The best of its panel."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Plans beside each other, on a scale of their own."""

    title: str
    bars: tuple[Bar, ...]


def draw(title: str, panels: Sequence[Panel]) -> str:
    """The SVG's text."""
    width = max(520, *(LEFT + len(panel.bars) * (BAR + GAP) + 24 for panel in panels))
    each = TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {40 + each * len(panels)}" '
        f'width="{width}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
        _legend(panels),
    ]
    parts += [_panel(panel, 40 + index * each) for index, panel in enumerate(panels)]
    return "\n".join([*parts, "</svg>", ""])


def _legend(panels: Sequence[Panel]) -> str:
    used = [name for name in COLOURS if any(bar.seconds.get(name) for panel in panels for bar in panel.bars)]
    return "".join(
        f'<rect x="{LEFT + place * 84}" y="26" width="10" height="10" fill="{COLOURS[name]}"/>'
        f'<text x="{LEFT + place * 84 + 14}" y="35">{name}</text>'
        for place, name in enumerate(used)
    )


def _panel(panel: Panel, y: int) -> str:
    most = max((sum(bar.seconds.values()) for bar in panel.bars), default=0.0) or 1.0
    base = y + TOP + HEIGHT
    parts = [f'<text x="{LEFT}" y="{y + 26}" font-weight="bold">{escape(panel.title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        line = base - share * HEIGHT
        right = LEFT + len(panel.bars) * (BAR + GAP)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{line:.1f}" y2="{line:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{line + 4:.1f}" text-anchor="end">{rounded_time(most * share)}</text>')
    for place, bar in enumerate(panel.bars):
        parts.append(_bar(bar, LEFT + GAP / 2 + place * (BAR + GAP), base, most))
    return "\n".join(parts)


def _bar(bar: Bar, x: float, base: float, most: float) -> str:
    top, parts = base, []
    for name, colour in COLOURS.items():
        seconds = bar.seconds.get(name, 0.0)
        if seconds > 0:
            height = seconds / most * HEIGHT
            top -= height
            parts.append(
                f'<rect x="{x:.1f}" y="{top:.2f}" width="{BAR}" height="{height:.2f}" fill="{colour}">'
                f"<title>{escape(bar.label)}: {name} {rounded_time(seconds)}</title></rect>"
            )
    weight = ' font-weight="bold"' if bar.marked else ""
    at = f"{x + BAR / 2 + 4:.1f} {base + 8:.1f}"
    total = f'<text x="{x + BAR / 2:.1f}" y="{top - 4:.1f}" text-anchor="middle">*</text>' if bar.marked else ""
    label = f'<text transform="translate({at}) rotate(-60)" text-anchor="end"{weight}>{escape(bar.label)}</text>'
    return "".join([*parts, total, label])
