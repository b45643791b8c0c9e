"""Real processes that train on without a model server that was killed: its shard is on another one, too."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.launcher.launched import Launched
from tests.launcher.test_elastic import TASK

STEPS = 1000  # the new server needs time to join
TOPOLOGY = """
[job]
task = "task.py"
steps = {steps}
timeout = "20 s"
oversubscribe = true
restarts = 1
eval_every = 500
[compute]
groups = 3
batch_size = 8
[exchange]
kind = "model_server"
staleness = "{staleness}"
shards = 2
replicas = 1
[observe]
events_per_s = "all"
"""


@pytest.mark.parametrize("staleness", ["async", "sync"])
def test_a_server_is_killed_and_its_successor_becomes_the_backup(tmp_path: Path, staleness: str) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "trial.toml").write_text(TOPOLOGY.format(staleness=staleness, steps=STEPS))
    with Launched(tmp_path, "trial.toml") as run:
        workers = {int(match[1]) for match in run.wait_for(r"worker/\d \| ready (\d+)", 3)}
        run.wait_for(r"^step ")
        siblings = psutil.Process(min(workers)).parent().children()  # type: ignore[union-attr]
        next(process for process in siblings if process.pid not in workers).kill()
        assert run.end() == 0, run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        (lost,) = [event["values"]["peer"] for event in events if event["kind"] == "lost"]
        shard, other = (0, "server/1") if lost == "server/0" else (1, "server/0")
        backups = [(event["values"]["shard"], event["values"]["backup"]) for event in events if event["kind"] == "backup"]
        assert sorted(backups[:2]) == [(0, "server/1"), (1, "server/0")]
        assert sorted(backups[2:4]) == [(0, None), (1, None)]
        assert sorted(backups[4:]) == [(0, lost), (1, lost)]
        took = [(f"server/{event['rank']}", event["values"]["shard"]) for event in events if event["kind"] == "took over"]
        assert took == [(other, shard)]
        for rank in range(3):
            assert [event["step"] for event in events if event["kind"] == "step" and event["rank"] == rank] == list(range(STEPS))
        summary = run.json("summary.json")
        assert summary["eval"]["eval_loss"] < 1e-3
        assert summary["checkpoints"]["newest"] == STEPS
        assert (run.run / "model.safetensors").exists()
        assert any(lost in line and "killed by SIGKILL" in line for line in run.lines), "the end says who was lost"
