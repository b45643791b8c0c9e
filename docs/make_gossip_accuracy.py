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

from zmqtrain import svg

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
    shift, middle = number * WIDTH, number * WIDTH + WIDTH / 2
    epochs = max(len(values) for values in curves.values())
    frame = svg.Frame(shift + LEFT, TOP, shift + WIDTH - 16, HEIGHT - BOTTOM)
    parts = [svg.text(middle, 20, TITLES[number], "middle")]
    parts += frame.levels((share, f"{low + (high - low) * share:.4g}") for share in svg.QUARTERS)
    for (kind, colour), values in zip(KINDS, curves.values(), strict=True):
        shares = [(max(low, value) - low) / (high - low) for value in values]
        parts.append(svg.curve(((frame.x((epoch + 0.5) / epochs), frame.y(share)) for epoch, share in enumerate(shares)), colour))
        y = frame.bottom - (36 if kind == "gossip" else 18)
        parts.append(svg.line_key(shift + WIDTH - 190, y, colour, f"{kind}: {values[-1]:.2f} % in the end"))
    return [*parts, svg.text(middle, HEIGHT - 12, f"test accuracy (%) over {epochs} epochs", "middle")]


def picture(document: dict[str, dict[str, list[float]]]) -> str:
    """All panels, beside each other."""
    parts = [part for number, title in enumerate(TITLES) for part in panel(number, document[title])]
    return svg.picture("Accuracy of gossip and of all-reduce at equal epochs", 2 * WIDTH, HEIGHT, parts)


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
    (HERE / "gossip-accuracy.svg").write_text(picture(document))


if __name__ == "__main__":
    main()
