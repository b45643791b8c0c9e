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

GROUPS = (1, 2, 3, 4, 6, 8, 12, 16)
SEEDS = (1, 2, 3, 4, 5)
UPDATES = 3000

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 360, 56, 24, 16, 48


def x_of(groups: float) -> float:
    """Even steps of g, from 0 to 17."""
    return LEFT + groups / 17 * (WIDTH - LEFT - RIGHT)


def y_of(momentum: float) -> float:
    """0 to 1, and a little room below."""
    return TOP + (1 - momentum) / 1.06 * (HEIGHT - TOP - BOTTOM)


def picture(fitted: dict[int, Sequence[float]]) -> str:
    """The plot, readable on light and dark pages."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13" role="img">',
        "<title>Implicit momentum of g asynchronous groups: simulated, and 1 - 1/g</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = y_of(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#333333">{tick:g}</text>')
    label_y = HEIGHT - BOTTOM + 20
    parts += [f'<text x="{x_of(g):.1f}" y="{label_y}" text-anchor="middle" fill="#333333">{g}</text>' for g in fitted]
    points = " ".join(f"{x_of(g / 8):.1f},{y_of(1 - 8 / g):.1f}" for g in range(8, 17 * 8 + 1))
    parts.append(f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="2"/>')
    for groups, values in fitted.items():
        x = x_of(groups)
        top, bottom = y_of(max(values)), y_of(min(values))
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke="#d62728" stroke-width="2"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y_of(statistics.median(values)):.1f}" r="4.5" fill="#d62728"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts += [
        f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle" fill="#333333">asynchronous groups g</text>',
        f'<text x="16" y="{(TOP + HEIGHT - BOTTOM) / 2:.0f}" text-anchor="middle" fill="#333333" '
        f'transform="rotate(-90 16 {(TOP + HEIGHT - BOTTOM) / 2:.0f})">momentum</text>',
        f'<circle cx="{WIDTH - 330}" cy="{HEIGHT - BOTTOM - 56}" r="4.5" fill="#d62728"/>',
        f'<text x="{WIDTH - 318}" y="{HEIGHT - BOTTOM - 52}" fill="#333333">'
        f"simulated: median and range of {len(SEEDS)} seeds</text>",
        f'<line x1="{WIDTH - 338}" x2="{WIDTH - 322}" y1="{HEIGHT - BOTTOM - 34}" y2="{HEIGHT - BOTTOM - 34}" stroke="#1f77b4" '
        'stroke-width="2"/>',
        f'<text x="{WIDTH - 318}" y="{HEIGHT - BOTTOM - 30}" fill="#333333">theorem 1: 1 - 1/g</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


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
