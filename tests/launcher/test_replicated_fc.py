"""Real processes that train on without an FC server that was killed, since another one has a copy; and then without that one."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.launched import Launched, waiting_loss
from tests.launcher.test_grid import TASK
from tests.patience import PATIENCE_S

#: What comes before the task: both FC servers stand still in the middle of a turn until something has happened.
LOSS = waiting_loss({20: "killed", 60: "killed-again"}, "nn.functional.cross_entropy")
#: The beginning of the task, which says who it is.
SAYS = """
def task():
    import os
    print("is", os.getpid())
"""
STEPS = 60
TOPOLOGY = """
[job]
task = "task.py"
steps = {steps}
oversubscribe = true
timeout = "60 s"
restarts = 1
[compute]
groups = 2
batch_size = 12
device = "cpu"
threads = 1
[exchange]
kind = "model_server"
staleness = "sync"
shards = 2
merged_fc = true
replicas = 1
[observe]
events_per_s = "all"
"""


def events_of(run: Launched) -> list[dict[str, Any]]:
    lines = (run.run / "events.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def took_over(events: list[dict[str, Any]]) -> list[str]:
    return [f"fc/{event['rank']}" for event in events if event["kind"] == "took over" and event["values"]["shard"] == 2]


def goes_on(run: Launched) -> bool:
    """Whether fc/1 has taken over and has said so, and fc/0 has a copy again. What a process has not yet reported when it is
    killed is lost with it, and the coordinator may know of the copy before the event has come."""
    events = events_of(run)
    backups = [event["values"] for event in events if event["kind"] == "backup"]
    return "fc/1" in took_over(events) and any(each["shard"] == 2 and each["backup"] == "fc/0" for each in backups)


def losses(folder: Path, *, kill: bool) -> dict[tuple[int, int], float]:
    """By step and rank."""
    folder.mkdir()
    (folder / "task.py").write_text(
        TASK.replace("loss=nn.functional.cross_entropy", "loss=loss").replace("\ndef task():\n", LOSS + SAYS, 1)
    )
    (folder / "trial.toml").write_text(TOPOLOGY.format(steps=STEPS))
    with Launched(folder, "trial.toml") as run:
        if kill:
            pids = {match[1]: int(match[2]) for match in run.wait_for(r"(fc/\d) \| is (\d+)", 2)}
            run.wait_for(r"^step ")
            os.kill(pids["fc/0"], signal.SIGKILL)
            (folder / "killed").touch()
            end = time.monotonic() + PATIENCE_S
            while not goes_on(run) and time.monotonic() < end:  # what is missing is shown below
                time.sleep(0.02)
            os.kill(pids["fc/1"], signal.SIGKILL)
        for file in ("killed", "killed-again"):
            (folder / file).touch()
        assert run.end() == 0, run
        events = events_of(run)
        assert run.json("summary.json")["checkpoints"]["newest"] == STEPS
        assert (run.run / "model.safetensors").exists()
    if kill:
        assert took_over(events) == ["fc/1", "fc/0"]
    return {(event["step"], event["rank"]): event["values"]["loss"] for event in events if event["kind"] == "step"}


def test_each_of_them_is_killed(tmp_path: Path) -> None:
    """Synchronous training, in double precision: the losses are those of a run that has lost nothing."""
    found, expected = (losses(tmp_path / str(kill), kill=kill) for kill in (True, False))
    assert len(found) == 2 * STEPS
    assert found == {where: pytest.approx(loss, rel=1e-9) for where, loss in expected.items()}
