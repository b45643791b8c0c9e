"""Real processes: a host with a model server leaves while the others train on, and its shard moves to another one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.launcher.launched import Launched
from tests.launcher.test_elastic import LEAVES, TASK
from zmqtrain.cli.drain import run_drain

TOPOLOGY = """
[job]
task = "task.py"
steps = {steps}
timeout = "60 s"
oversubscribe = true
elastic = true
[[hosts]]
name = "h[1-3]"
slots = 1
[compute]
groups = 3
batch_size = 8
[exchange]
kind = "model_server"
staleness = "{staleness}"
shards = 3
{replicas}
[observe]
events_per_s = "all"
"""


def prepare(folder: Path, steps: int, staleness: str, replicas: str) -> None:
    """Its task trains the last steps once there is a file ``left``."""
    task = TASK.replace("torch.nn.functional.mse_loss", "loss").replace("\ndef task", LEAVES, 1)
    (folder / "task.py").write_text(task.replace("lr=0.02", "lr=0.1"))
    (folder / "trial.toml").write_text(TOPOLOGY.format(steps=steps, staleness=staleness, replicas=replicas))


def test_a_host_with_a_server_that_is_shut_down_leaves(tmp_path: Path) -> None:
    """``docker stop``, systemd and Kubernetes send its agent SIGTERM, and wait a while."""
    prepare(tmp_path, 80, "async", "replicas = 0")
    with Launched(tmp_path, "trial.toml") as run:
        run.wait_for(r"^step ")
        agent = run.find("agent/h2")
        agent.send_signal(signal.SIGTERM)
        run.wait_for("h2 has left the run")
        (tmp_path / "left").touch()
        assert run.end() == 0, run
        assert not agent.is_running()
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        moved = [event["values"] for event in events if event["kind"] == "moved"]
        assert [(each["shard"], each["before"]) for each in moved] == [(1, "server/1")]
        assert run.json("summary.json")["account"]["repeated"] == 0


@pytest.mark.parametrize(("staleness", "replicas"), [("async", "replicas = 1"), ("sync", "replicas = 0")])
def test_a_host_with_a_server_leaves(tmp_path: Path, staleness: str, replicas: str, capsys: pytest.CaptureFixture[str]) -> None:
    steps = 80
    prepare(tmp_path, steps, staleness, replicas)
    with Launched(tmp_path, "trial.toml") as run:
        run.wait_for(r"^step ")
        assert run_drain(str(run.run), "h2") == 0
        assert "h2 has left the run" in capsys.readouterr().out
        (tmp_path / "left").touch()
        assert run.end() == 0, run
        assert any("h2 is asked to leave: what server/1 has moves to others" in line for line in run.lines), run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        assert sorted(event["values"]["peer"] for event in events if event["kind"] == "lost") == ["server/1", "worker/1"]
        moved = [event["values"] for event in events if event["kind"] == "moved"]
        assert [(each["shard"], each["before"]) for each in moved] == [(1, "server/1")]
        assert not any(event["kind"] == "backup" and event["values"]["backup"] is None for event in events)
        for rank in (0, 2):
            assert [event["step"] for event in events if event["kind"] == "step" and event["rank"] == rank] == list(range(steps))
        summary = run.json("summary.json")
        trained = sum(event["values"]["samples"] for event in events if event["kind"] == "step")
        # The last batch of the worker that leaves counts if its gradient has arrived by then, and is in its report if that has.
        account = summary["account"]
        assert abs(account["counted"] - trained) in (0, 8)
        assert (account["repeated"], account["counted"] + account["lost"]) == (0, account["due"])
        assert summary["eval"]["eval_loss"] < 1e-3
        assert (run.run / "model.safetensors").exists()
