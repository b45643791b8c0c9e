"""Samples that travel round the ring between real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher.launched import Launched
from tests.launcher.test_elastic import TASK

TOPOLOGY = """
[job]
task = "task.py"
epochs = 4
timeout = "20 s"
oversubscribe = true
[compute]
groups = 3
batch_size = 8
[exchange]
kind = "gossip"
[data]
shuffle = "ring"
ring = "{ring}"
"""


@pytest.mark.parametrize("ring", ["tensors", "indices"])
def test_every_sample_is_trained_once_a_lap(tmp_path: Path, ring: str) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "trial.toml").write_text(TOPOLOGY.format(ring=ring))
    with Launched(tmp_path, "trial.toml") as run:
        assert run.end() == 0, run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        accounts = {event["rank"]: event["values"] for event in events if event["kind"] == "samples"}
        assert sum(account["trained"] for account in accounts.values()) == 4 * 512
        assert not any(account["lost"] or account["repeated"] for account in accounts.values())
        moved = sum(account["received"] for account in accounts.values())
        assert moved >= (3 * 512 if ring == "tensors" else 0)
        assert ring == "tensors" or moved == 0
