"""Writes docs/gossip-accuracy.json and .svg from four finished runs::

    for kind in gossip allreduce; do
        zmqtrain launch launch/mnist-gossip.toml --data DIR --run-dir mnist-$kind --set exchange.kind=$kind \
            --set exchange.gossip.average_evaluations=$([ $kind = gossip ] && echo true || echo false)
    done                                            # the same with launch/cifar10-gossip.toml: about half an hour on two cores
    python docs/make_gossip_accuracy.py mnist-gossip mnist-allreduce cifar10-gossip cifar10-allreduce
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
TITLES = ("LeNet on MNIST, 8 peers", "CIFARNet on CIFAR-10, 4 peers")
KINDS = (("gossip", "#d62728"), ("all-reduce", "#1f77b4"))
RANGES = ((97.0, 99.4), (35.0, 80.0))
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 400, 300, 50, 36, 44


def accuracies(run: Path) -> list[float]:
    """Per cent, after each epoch."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [round(100 * event["values"]["eval_accuracy"], 2) for event in events if event["kind"] == "eval"]


def panel(number: int, curves: dict[str, list[float]]) -> list[str]:
    """One plot of all its curves."""
    low, high = RANGES[number]
    shift = number * WIDTH
    epochs = max(len(values) for values in curves.values())

    def place(epoch: int, value: float) -> str:
        x = shift + LEFT + (epoch + 0.5) / epochs * (WIDTH - LEFT - 16)
        return f"{x:.1f},{TOP + (high - max(low, value)) / (high - low) * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = [f'<text x="{shift + WIDTH / 2:.0f}" y="20" text-anchor="middle" fill="#333333">{TITLES[number]}</text>']
    for step in range(5):
        value = low + (high - low) * step / 4
        y = place(0, value).split(",")[1]
        parts.append(f'<line x1="{shift + LEFT}" x2="{shift + WIDTH - 16}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{shift + LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end" fill="#333333">{value:.4g}</text>')
    for (kind, colour), values in zip(KINDS, curves.values(), strict=True):
        points = " ".join(place(epoch, value) for epoch, value in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = HEIGHT - BOTTOM - (36 if kind == "gossip" else 18)
        parts.append(
            f'<line x1="{shift + WIDTH - 190}" x2="{shift + WIDTH - 170}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{shift + WIDTH - 164}" y="{y + 4}" fill="#333333">{kind}: {values[-1]:.2f} % in the end</text>')
    words = f"test accuracy (%) over {epochs} epochs"
    parts.append(f'<text x="{shift + WIDTH / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle" fill="#333333">{words}</text>')
    return parts


def main() -> None:
    """Read the runs, and write both files."""
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    runs = [accuracies(Path(name)) for name in sys.argv[1:]]
    document = {
        title: dict(zip((kind for kind, _ in KINDS), runs[2 * number : 2 * number + 2], strict=True))
        for number, title in enumerate(TITLES)
    }
    (HERE / "gossip-accuracy.json").write_text(json.dumps(document) + "\n")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        "<title>Accuracy of gossip and of all-reduce at equal epochs</title>",
        f'<rect width="{2 * WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for number, title in enumerate(TITLES):
        parts += panel(number, document[title])
    (HERE / "gossip-accuracy.svg").write_text("\n".join([*parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
