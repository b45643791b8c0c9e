"""A grid of several rows that loses a worker, in processes: the others form a smaller grid, and none of them ends."""

import json
from pathlib import Path

import torch

from tests.launcher.launched import Launched, prepare
from tests.launcher.test_restarts import TASK, TOPOLOGY, trained

ELASTIC = (
    TOPOLOGY.replace("restarts = 1", "elastic = true")
    .replace("checkpoint_every = 4", "checkpoint_every = 0")
    .replace("group_size = 2", "group_size = 4")
    .replace('grid = "2x1"', 'grid = "2x2"')
)


def test_the_others_go_on_without_a_worker_that_is_killed(tmp_path: Path) -> None:
    whole, fewer = (prepare(tmp_path / name, TASK, ELASTIC) for name in ("whole", "fewer"))
    (fewer / "kills").touch()
    with Launched(whole, "trial.toml") as run:
        assert run.end() == 0, run
    with Launched(fewer, "trial.toml") as run:
        assert run.end() == 0, run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        assert not [event for event in events if event["kind"] == "restart"]
        views = [event for event in events if event["kind"] == "view"]
        assert {event["rank"] for event in views} == {0, 3}, "one of each row"
        assert all(event["step"] == 11 and "2x1" in event["values"]["reason"] for event in views)
        summary = run.json("summary.json")
        assert (summary["status"], summary["restarts"], summary["steps"]) == ("done", 0, 24)
        assert summary["account"] == {"due": 192, "counted": 192, "repeated": 0, "lost": 0, "why": None}
        ended = {event["rank"]: event["values"]["exit_code"] for event in events if event["kind"] == "exit"}
        assert ended == {0: 0, 1: -9, 2: 0, 3: 0}
        assert len([event for event in events if event["kind"] == "exit"]) == 4, "each process has ended once"
    mine, theirs = trained(fewer), trained(whole)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-12, msg=name)  # sums in another order
