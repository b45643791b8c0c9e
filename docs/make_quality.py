"""Writes docs/quality.svg from what ``python -m benchmarks quality --json`` has printed::

python -m benchmarks quality --data DIR --peers-python PYTHON --mxnet-python PYTHON --json > quality.jsonl
python docs/make_quality.py quality.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.quality import OURS, PEERS
from benchmarks.quality_task import PROBLEMS
from zmqtrain import svg
from zmqtrain.charts import Bar, Bars, draw

TITLES = {"cifar": "CIFARNet on CIFAR-10", "shakespeare": "a transformer on Shakespeare"}
COLOURS = {"zmqtrain": svg.COLOURS[0], "others": "#999999"}


def picture(lines: Iterable[str]) -> svg.Picture:
    """A panel for each problem and network: the median of each system's seconds; the fastest has a star."""
    panels: dict[tuple[str, str], dict[str, float]] = {}
    for case in map(json.loads, lines):
        problem, network, system = case["case"].split(", ", 2)
        if system in {**OURS, **PEERS}:  # and not one of its other figures
            panels.setdefault((problem, network), {})[system] = case["value"]
    return draw("Time to the same validation loss, four hosts", [_panel(*key, values) for key, values in panels.items()])


def _panel(problem: str, network: str, values: dict[str, float]) -> Bars:
    least = min(values.values())
    bars = (
        Bar(system, {"zmqtrain" if system in OURS else "others": value}, marked=value == least)
        for system, value in sorted(values.items(), key=lambda item: item[1])
    )
    title = f"{TITLES[problem]} to {PROBLEMS[problem].loss:g}, {network}: seconds"
    return Bars(title, tuple(bars), COLOURS, lambda value: f"{value:.3g}")


def main() -> None:
    """Read the lines, and write the picture."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    Path(__file__).with_name("quality.svg").write_text(picture(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
