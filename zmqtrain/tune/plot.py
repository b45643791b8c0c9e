"""Draws the trials of a search, and the trade-off over groups, as self-contained SVGs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from zmqtrain import svg
from zmqtrain.topology.rounded import rounded_duration
from zmqtrain.tune.trial import Outcome, Trial

WIDTH, HEIGHT = 720, 360
FRAME = svg.Frame(64, 44, WIDTH - 150, HEIGHT - 52)
#: The x coordinate at which the legend begins.
BESIDE = FRAME.right + 12


def trials_svg(title: str, trials: Sequence[tuple[Trial, Outcome]]) -> str:
    """Loss over time: a bar from each trial's first loss to its last, as wide as its duration; training is filled. Colours are
    numbers of groups. The gap before a bar is the time for starting and ending its run."""
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
    parts = [svg.text(FRAME.left, 22, title, bold=True, size=14)]
    parts += FRAME.levels((share, f"{low + share * (high - low):.3g}") for share in svg.QUARTERS)
    for begin, end, trial, outcome in bars:
        colour = _colour(groups.index(trial.setting.groups))
        x, width = (FRAME.x(begin / time), FRAME.x(end / time) - FRAME.x(begin / time)) if time else (FRAME.left, 0.0)
        ends = [
            FRAME.y((each - low) / (high - low)) if math.isfinite(each) else FRAME.top for each in (outcome.first, outcome.loss)
        ]
        said = f"{trial.number}: {trial.phase}, {trial.setting}: loss {outcome.loss:.4g} after {outcome.updates} updates"
        fill, top, height = colour if trial.kind == "train" else "none", min(ends), abs(ends[0] - ends[1])
        parts.append(svg.bar(x, top, max(1.0, width), max(1.0, height), fill, says=said, edge=colour))
        if outcome.diverged:
            parts.append(svg.text(x + max(1.0, width) / 2, top - 3, "x", "middle"))
    names = ["1 group" if number == 1 else f"{number} groups" for number in groups]
    parts += _legend(names)
    below = FRAME.top + 18 * len(groups) + 12
    parts += [svg.text(BESIDE, below, "filled: training"), svg.text(BESIDE, below + 18, "x: diverged")]
    steps_s = sum(end - begin for begin, end, _, _ in bars)
    said = f"time: {rounded_duration(time)} in all, of which {rounded_duration(steps_s)} in steps; loss upwards"
    return svg.picture(title, WIDTH, HEIGHT, [*parts, svg.text(FRAME.x(0.5), HEIGHT - 10, said, "middle")])


def curves_svg(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """HE, SE and the total time over the number of groups, each relative to its best; both axes are logarithmic."""
    names = {"he": "time an update (HE)", "se": "updates (SE)", "total": "time in all"}
    values = [row[name] for row in rows for name in names if row[name]]
    high = max(1.0, math.log2(max(values, default=2.0)) * 1.05)
    groups = [row["groups"] for row in rows]
    span = max(1e-9, math.log2(max(groups)) - math.log2(min(groups))) if groups else 1.0

    def x_of(number: int) -> float:
        return FRAME.x((math.log2(number) - math.log2(min(groups))) / span * 0.94 + 0.03)

    parts = [svg.text(FRAME.left, 22, title, bold=True, size=14)]
    parts += FRAME.levels((power / high, f"{2**power}x") for power in range(math.floor(high) + 1))
    parts += [svg.text(x_of(number), FRAME.bottom + 18, str(number), "middle") for number in groups]
    for place, name in enumerate(names):
        points = [(x_of(row["groups"]), FRAME.y(math.log2(row[name]) / high)) for row in rows if row[name]]
        parts += [svg.curve(points, _colour(place)), *(svg.dot(x, y, _colour(place)) for x, y in points)]
    parts += _legend(names.values())
    return svg.picture(title, WIDTH, HEIGHT, [*parts, svg.text(FRAME.x(0.5), HEIGHT - 10, "compute groups", "middle")])


def _legend(entries: Iterable[str]) -> list[str]:
    return [svg.colour_key(BESIDE, FRAME.top + 18 * place, _colour(place), words) for place, words in enumerate(entries)]


def _colour(place: int) -> str:
    return svg.COLOURS[place % len(svg.COLOURS)]
