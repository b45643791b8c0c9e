"""What a search tried, and the trade-off over groups, as self-contained SVGs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from zmqtrain.tune.trial import Outcome, Trial

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 360, 64, 44, 150, 52
#: Okabe and Ito's, which the colour-blind can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")


def trials_svg(title: str, trials: Sequence[tuple[Trial, Outcome]]) -> str:
    """Loss over time: a bar from each trial's first loss to its last, as wide as it took; training is filled. Colours are numbers
    of groups. Before a bar is the time that starting and ending its run took."""
    bars = []
    time = 0.0
    for trial, outcome in trials:
        begin = time + max(0.0, outcome.spent_s - outcome.seconds)
        time += outcome.spent_s
        bars.append((min(begin, time), time, trial, outcome))
    losses = [loss for _, _, _, outcome in bars for loss in (outcome.first, outcome.loss) if math.isfinite(loss)]
    low, high = (min(losses), max(losses)) if losses else (0.0, 1.0)
    high = high if high > low else low + 1.0
    groups = sorted({trial.setting.groups for trial, _ in trials})
    parts = [_head(title)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{low + share * (high - low):.3g}", "end"))
    for begin, end, trial, outcome in bars:
        colour = COLOURS[groups.index(trial.setting.groups) % len(COLOURS)]
        x, width = _x(begin / time) if time else LEFT, max(1.0, (end - begin) / time * (WIDTH - LEFT - RIGHT)) if time else 1.0
        first = outcome.first if math.isfinite(outcome.first) else high
        last = outcome.loss if math.isfinite(outcome.loss) else high
        ends = [_y((each - low) / (high - low)) for each in (first, last)]
        fill = colour if trial.kind == "train" else "none"
        said = f"{trial.number}: {trial.phase}, {trial.setting}: loss {outcome.loss:.4g} after {outcome.updates} updates"
        parts.append(
            f'<rect x="{x:.1f}" y="{min(ends):.1f}" width="{width:.1f}" height="{max(1.0, abs(ends[0] - ends[1])):.1f}" '
            f'fill="{fill}" fill-opacity="0.6" stroke="{colour}"><title>{escape(said)}</title></rect>'
        )
        if outcome.diverged:
            parts.append(_text(x + width / 2, min(ends) - 3, "x", "middle"))
    parts += _legend([(_groups(each), COLOURS[place % len(COLOURS)]) for place, each in enumerate(groups)])
    parts.append(_text(WIDTH - RIGHT + 12, TOP + 18 * len(groups) + 12, "filled: training", "start"))
    parts.append(_text(WIDTH - RIGHT + 12, TOP + 18 * len(groups) + 30, "x: diverged", "start"))
    said = f"time: {time:.4g} s in all, of which {sum(end - begin for begin, end, _, _ in bars):.4g} s in steps; loss upwards"
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, said, "middle"))
    return "\n".join([*parts, "</svg>", ""])


def curves_svg(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """HE, SE and the total time over the number of groups, each beside its best; logarithmic both ways."""
    names = {"he": "time an update (HE)", "se": "updates (SE)", "total": "time in all"}
    values = [row[name] for row in rows for name in names if row[name]]
    high = max(1.0, math.log2(max(values, default=2.0)) * 1.05)
    groups = [row["groups"] for row in rows]
    span = max(1e-9, math.log2(max(groups)) - math.log2(min(groups))) if groups else 1.0

    def x_of(number: int) -> float:
        return _x((math.log2(number) - math.log2(min(groups))) / span * 0.94 + 0.03)

    parts = [_head(title)]
    for power in range(math.floor(high) + 1):
        y = _y(power / high)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{2**power}x", "end"))
    parts += [_text(x_of(number), HEIGHT - BOTTOM + 18, str(number), "middle") for number in groups]
    for place, name in enumerate(names):
        points = [(x_of(row["groups"]), _y(math.log2(row[name]) / high)) for row in rows if row[name]]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[place]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[place]}"/>' for x, y in points]
    parts += _legend([(text, COLOURS[place]) for place, text in enumerate(names.values())])
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "compute groups", "middle"))
    return "\n".join([*parts, "</svg>", ""])


def _groups(number: int) -> str:
    return "1 group" if number == 1 else f"{number} groups"


def _head(title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold">{escape(title)}</text>'
    )


def _legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    x = WIDTH - RIGHT + 12
    return [
        f'<rect x="{x}" y="{TOP + 18 * place - 9}" width="10" height="10" fill="{colour}"/>' + _text(x + 14, TOP + 18 * place, text)
        for place, (text, colour) in enumerate(entries)
    ]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)
