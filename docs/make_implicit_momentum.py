"""Writes docs/implicit-momentum.json and .svg: ``python docs/make_implicit_momentum.py`` (about half a minute)."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from examples.implicit_momentum import measure  # noqa: E402 - it is not installed
from zmqtrain import svg  # noqa: E402

GROUPS = (1, 2, 3, 4, 6, 8, 12, 16)
SEEDS = (1, 2, 3, 4, 5)
UPDATES = 3000

WIDTH, HEIGHT = 640, 360
#: 0 to 17 groups, and momentum 0 to 1.
FRAME = svg.Frame(56, 24, WIDTH - 16, 295.7)
LINE, DOTS = "#1f77b4", "#d62728"


def picture(fitted: dict[int, Sequence[float]]) -> str:
    """The plot, readable on light and dark pages."""
    parts = FRAME.levels((share, f"{share:g}") for share in svg.QUARTERS)
    parts += [svg.text(FRAME.x(groups / 17), HEIGHT - 28, str(groups), "middle") for groups in fitted]
    parts.append(svg.curve(((FRAME.x(g / 8 / 17), FRAME.y(1 - 8 / g)) for g in range(8, 17 * 8 + 1)), LINE))
    for groups, values in fitted.items():
        x = FRAME.x(groups / 17)
        parts.append(svg.line(x, FRAME.y(max(values)), x, FRAME.y(min(values)), DOTS))
        parts.append(svg.dot(x, FRAME.y(statistics.median(values)), DOTS, 4.5))
    left = WIDTH - 344
    parts += [
        svg.text(FRAME.x(0.5), HEIGHT - 8, "asynchronous groups g", "middle"),
        svg.text(16, HEIGHT / 2 - 12, "momentum", "middle", turned=-90),
        svg.dot(left + 10, HEIGHT - 104, DOTS, 4.5),
        svg.text(left + 26, HEIGHT - 100, f"simulated: median and range of {len(SEEDS)} seeds"),
        svg.line_key(left, HEIGHT - 82, LINE, "theorem 1: 1 - 1/g"),
    ]
    says = "Implicit momentum of g asynchronous groups: simulated, and 1 - 1/g"
    return svg.picture(says, WIDTH, HEIGHT, parts, font_size=13)


def main() -> None:
    """Simulate, and write both files."""
    runs = [measure(GROUPS, UPDATES, seed) for seed in SEEDS]
    fitted = {groups: [run[groups][0] for run in runs] for groups in GROUPS}
    rows = [
        {"groups": groups, "expected": round(1 - 1 / groups, 4), "fitted": [round(value, 4) for value in values]}
        for groups, values in fitted.items()
    ]
    document = {"updates": UPDATES, "seeds": list(SEEDS), "momentum": rows}
    (HERE / "implicit-momentum.json").write_text(json.dumps(document, indent=1) + "\n")
    (HERE / "implicit-momentum.svg").write_text(picture(fitted))


if __name__ == "__main__":
    main()
