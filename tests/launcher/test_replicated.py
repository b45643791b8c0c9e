"""Real processes that train on without a model server that was killed: its shard is on another one, too."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil

from tests.launcher.launched import Launched, waiting_loss
from tests.launcher.test_elastic import TASK
from tests.patience import PATIENCE_S

#: What comes before the task: step 30 takes until the server is killed, step 60 until another one has come in its place.
LOSS = waiting_loss({30: "killed", 60: "joined"}, "torch.nn.functional.mse_loss")
STEPS = 80
TOPOLOGY = """
[job]
task = "task.py"
steps = {steps}
timeout = "60 s"
oversubscribe = true
restarts = 1
eval_every = 40
[compute]
groups = 3
batch_size = 8
[exchange]
kind = "model_server"
staleness = "async"
shards = 2
replicas = 1
[observe]
events_per_s = "all"
"""


def events_of(run: Launched) -> list[dict[str, Any]]:
    lines = (run.run / "events.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def backups_of(run: Launched) -> list[tuple[int, str | None]]:
    return [(event["values"]["shard"], event["values"]["backup"]) for event in events_of(run) if event["kind"] == "backup"]


def test_a_server_is_killed_and_its_successor_becomes_the_backup(tmp_path: Path) -> None:
    """Asynchronous training. In step, and with bounds: tests/simulate/test_replicated_servers.py."""
    task = TASK.replace("torch.nn.functional.mse_loss", "loss").replace("\ndef task", LOSS + "\ndef task", 1)
    (tmp_path / "task.py").write_text(task.replace("lr=0.02", "lr=0.1"))
    (tmp_path / "trial.toml").write_text(TOPOLOGY.format(steps=STEPS))
    with Launched(tmp_path, "trial.toml") as run:
        workers = {int(match[1]) for match in run.wait_for(r"worker/\d \| ready (\d+)", 3)}
        run.wait_for(r"^step ")
        siblings = psutil.Process(min(workers)).parent().children()  # type: ignore[union-attr]
        next(process for process in siblings if process.pid not in workers).kill()
        (tmp_path / "killed").touch()
        end = time.monotonic() + PATIENCE_S
        while len(backups_of(run)) < 6 and time.monotonic() < end:  # what is missing is shown below
            time.sleep(0.02)
        (tmp_path / "joined").touch()
        assert run.end() == 0, run
        events = events_of(run)
        (lost,) = [event["values"]["peer"] for event in events if event["kind"] == "lost"]
        shard, other = (0, "server/1") if lost == "server/0" else (1, "server/0")
        backups = backups_of(run)
        assert sorted(backups[:2]) == [(0, "server/1"), (1, "server/0")]
        assert sorted(backups[2:4]) == [(0, None), (1, None)]
        assert sorted(backups[4:]) == [(0, lost), (1, lost)]
        took = [(f"server/{event['rank']}", event["values"]["shard"]) for event in events if event["kind"] == "took over"]
        assert took[0] == (other, shard)
        assert set(took[1:]) <= {(lost, 0), (lost, 1)}  # which then serves a shard again
        for rank in range(3):
            assert [event["step"] for event in events if event["kind"] == "step" and event["rank"] == rank] == list(range(STEPS))
        summary = run.json("summary.json")
        assert summary["eval"]["eval_loss"] < 1e-3
        assert summary["checkpoints"]["newest"] == STEPS
        assert (run.run / "model.safetensors").exists()
        assert any(lost in line and "killed by SIGKILL" in line for line in run.lines), "the end says who was lost"
