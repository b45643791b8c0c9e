"""Writes docs/step.svg, where the milliseconds of a small step go, from a finished run::

    zmqtrain launch launch/digits.toml --run-dir digits --set observe.trace_steps=200
    python docs/make_step.py digits

It draws the step of group 0 whose length is the median, and all processes meanwhile; and prints the means of all traced steps.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from zmqtrain import svg

HERE = Path(__file__).parent
WIDTH, LEFT, TOP, ROW, BOTTOM = 860, 80, 40, 40, 56
#: What is drawn: its beginning as the trace names it, a word for it, and its colour.
KINDS = (
    ("parameters of", "waits for parameters", "#dddddd"),
    ("forward", "forward", svg.COLOURS[0]),
    ("backward", "backward", svg.COLOURS[4]),
    ("reduce_scatter", "sum within the group", svg.COLOURS[5]),
    ("exchange", "with the servers", svg.COLOURS[1]),
    ("all_gather", "parameters within the group", svg.COLOURS[3]),
    ("update", "a server's update", svg.COLOURS[2]),
)
Span = tuple[str, str, int, float, float]  # process, name, step, begin and end in ms


def spans(run: Path) -> list[Span]:
    """What the trace has, but for what it shows twice."""
    found: dict[str, Any] = json.loads((run / "trace.json").read_text(encoding="utf-8"))
    events = found["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    drawn = [event for event in events if event["ph"] == "X" and event["name"] != "backward" and "step" in event["args"]]
    return sorted(
        (names[each["pid"]], each["name"], each["args"]["step"], each["ts"] / 1000, (each["ts"] + each["dur"]) / 1000)
        for each in drawn
    )


def kind_of(name: str) -> tuple[str, str] | None:
    """The word and the colour."""
    return next(((word, colour) for start, word, colour in KINDS if name.startswith(start)), None)


def median_step(found: list[Span]) -> tuple[float, float]:
    """When a step of median length of worker 0 begins and ends: from its forward to the next one's."""
    begins = sorted(begin for process, name, _, begin, _ in found if (process, name) == ("worker/0", "forward"))
    steps = sorted((after - before, before, after) for before, after in pairwise(begins))
    return steps[len(steps) // 2][1:]


def picture(found: list[Span]) -> svg.Picture:
    """The step, and what all processes do meanwhile."""
    first, last = median_step(found)
    processes = sorted({process for process, *_ in found}, key=lambda each: (each.split("/")[0] != "worker", each))
    height = TOP + ROW * len(processes) + BOTTOM
    scale = (WIDTH - LEFT - 16) / (last - first)
    parts = [svg.text(LEFT, 20, f"a step of {last - first:.1f} ms", bold=True)]
    for row, process in enumerate(processes):
        top = TOP + row * ROW
        parts.append(svg.text(LEFT - 8, top + ROW / 2 + 2, process, "end"))
        # What lasts longest is drawn first, below what lies within it.
        own = sorted((each for each in found if each[0] == process), key=lambda each: each[3] - each[4])
        for _, name, step, begin, end in own:
            kind = kind_of(name)
            if kind is None or end <= first or begin >= last:
                continue
            x = LEFT + scale * (max(begin, first) - first)
            wide = max(1.0, scale * (min(end, last) - max(begin, first)))
            parts.append(svg.bar(x, top + 6, wide, ROW - 14, kind[1], says=f"{name}, step {step}: {end - begin:.2f} ms"))
        parts.append(svg.line(LEFT, top + ROW - 4, WIDTH - 16, top + ROW - 4, "#eeeeee", 1))
    for mark in range(int(last - first) + 1):
        if mark % 2 == 0:
            x = LEFT + scale * mark
            parts.append(svg.line(x, TOP - 6, x, TOP - 2, "#888888", 1) + svg.text(x, TOP - 9, f"{mark}", "middle", size=10))
    for place, (_, word, colour) in enumerate(KINDS):
        parts.append(svg.colour_key(LEFT + place % 4 * 190, height - 30 + place // 4 * 18, colour, word))
    return svg.picture("where the milliseconds of a step go", WIDTH, height, parts)


def means(found: list[Span]) -> dict[str, float]:
    """Milliseconds of each kind, in the mean, without the first tenth of the steps."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for _, name, step, begin, end in found:
        kind = kind_of(name)
        if kind is not None and step > 20:
            lengths[kind[0]].append(end - begin)
    # The trace's forward contains its wait for the parameters.
    result = {word: sum(each) / len(each) for word, each in lengths.items()}
    result["forward"] -= result["waits for parameters"]
    return result


if __name__ == "__main__":
    found = spans(Path(sys.argv[1]))
    (HERE / "step.svg").write_text(picture(found))
    for word, ms in means(found).items():
        print(f"{word}: {ms:.2f} ms")
