"""What rotation, the sample ring and other partners are worth: ``python docs/make_gossip_variants.py`` prints a table.

It takes some minutes.

16 peers train the digits on virtual time with 8 samples each; arithmetic varies by a tenth, links carry 100 Mbit/s.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.load import parse_topology

SEEDS = (1, 2, 3)
EPOCHS = 25
TOPOLOGY = """
[job]
task = "{root}/examples/digits.py:task"
epochs = {epochs}
seed = {seed}
[[hosts]]
name = "n[01-16]"
address = "10.0.0.1"
slots = 1
[compute]
groups = 16
batch_size = 8
noise = {{ kind = "normal", spread = 0.1 }}
[exchange]
kind = "{kind}"
{gossip}
[data]
shuffle = "{shuffle}"
[network]
bandwidth = "100 Mbit/s"
latency = "100 us"
[observe]
trace_steps = 0
"""
#: Name, kind, [exchange] gossip, shuffle.
VARIANTS = (
    ("all-reduce (AGD)", "allreduce", "", "ring"),
    ("gossip: dissemination, rotation, sample ring", "gossip", "", "ring"),
    ("... without rotation", "gossip", "rotation = false", "ring"),
    ("... without the sample ring: always the same part", "gossip", "", "none"),
    ("... without either", "gossip", "rotation = false", "none"),
    ("... a ring of partners, no rotation", "gossip", 'topology = "ring", rotation = false', "ring"),
    ("... random partners", "gossip", 'topology = "random"', "ring"),
    ("... random and unbalanced", "gossip", 'topology = "random", balanced = false', "ring"),
)


def measure(kind: str, gossip: str, shuffle: str, seed: int) -> dict[str, float]:
    """Of one run: the final model's accuracy, how far models are apart, and the mean step."""
    steps: list[float] = []
    spread: list[float] = []
    found: dict[str, float] = {}

    def hear(_peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            values = event.get("values") or {}
            if event["kind"] == "step" and event["step"] >= 2:
                steps.append(values["seconds"])
            elif event["kind"] == "spread":
                spread.append(values["distance"])
            elif event["kind"] == "eval":
                found.update(loss=values["eval_loss"], accuracy=100 * values["eval_accuracy"])

    table = f"gossip = {{ {gossip} }}" if gossip else ""
    root = Path(__file__).parents[1]
    text = TOPOLOGY.format(root=root, epochs=EPOCHS, seed=seed, kind=kind, gossip=table, shuffle=shuffle)
    result = simulate(parse_topology(text), options=Options(on_report=hear))
    if result.ending.status != "done":
        sys.exit(f"{kind} {gossip} {shuffle} failed: {result.ending.error}")
    last = spread[-len(spread) // 4 :] if spread else [0.0]
    return {**found, "apart": 100 * statistics.fmean(last), "step_ms": 1e3 * statistics.fmean(steps)}


def main() -> None:
    """Simulate all, and print the table."""
    print("| variant | loss | accuracy | models apart | step |\n|---|---|---|---|---|")
    for name, kind, gossip, shuffle in VARIANTS:
        runs = [measure(kind, gossip, shuffle, seed) for seed in SEEDS]
        mean = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        print(
            f"| {name} | {mean['loss']:.4f} | {mean['accuracy']:.2f} % | {mean['apart']:.2f} % | {mean['step_ms']:.2f} ms |",
            flush=True,
        )


if __name__ == "__main__":
    main()
