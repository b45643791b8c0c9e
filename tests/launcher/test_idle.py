"""Everybody's machines are used: the first example for clusters as it stands there, and what is said of machines that are not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.launcher.launched import Launched

EXAMPLE = Path("docs/clusters.md").read_text().partition("```toml\n")[2].partition("```")[0]
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from zmqtrain import Task

def task():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return Task(
        model=lambda: nn.Linear(8, 2),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=TensorDataset(x, (x[:, 0] > 0).long()),
    )
"""
#: What the example leaves out, as one does who has no cluster; and few threads, which are not what this is about.
HERE = ("--emulate", "--shaping", "paced", "--set", 'network.bandwidth="10 Gbit/s"', "--set", "compute.threads=4")


def launch(folder: Path, *settings: str) -> Launched:
    (folder / "train.py").write_text(TASK)
    (folder / "cluster.toml").write_text(EXAMPLE)
    more = [word for setting in ("job.steps=4", "job.port=0", *settings) for word in ("--set", setting)]
    with Launched(folder, *HERE, *more, "cluster.toml") as launched:
        assert launched.end() == 0, repr(launched)
    return launched


def events(launched: Launched) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (launched.run / "events.jsonl").read_text().splitlines()]


def test_the_first_example_for_clusters_trains_on_all_four_hosts(tmp_path: Path) -> None:
    launched = launch(tmp_path)
    summary = launched.json("summary.json")
    assert (summary["groups"], summary["group_size"], summary["roles"]) == (1, 4, {"worker": 4, "server": 0})
    steps = [event for event in events(launched) if event["kind"] == "step"]
    assert Counter(event["host"] for event in steps) == {f"node0{number}": 4 for number in range(1, 5)}
    assert {event["values"]["samples"] for event in steps} == {16}
    (said,) = [line for line in launched.lines if "warning" in line]
    assert "16 of 32 slots would be idle: remove [compute] threads = 4" in said


def test_a_launch_says_which_hosts_would_be_idle(tmp_path: Path) -> None:
    launched = launch(tmp_path, "compute.groups=2", "exchange.kind=gossip")
    warnings = [line for line in launched.lines if "warning" in line]
    assert "node03 and node04 would be idle: 2 workers on 2 of 4 hosts" in warnings[0]
    assert [event["values"]["text"] for event in events(launched) if event["kind"] == "note"][: len(warnings)] == warnings
