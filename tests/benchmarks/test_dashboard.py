"""The run of many workers that the dashboard's benchmark writes."""

from __future__ import annotations

from pathlib import Path

from benchmarks import dashboard
from zmqtrain.cli.runs import state_of_run
from zmqtrain.observe.dashboard.follow import Followed, seen


def test_it_looks_like_a_run_that_trains(tmp_path: Path) -> None:
    events = dashboard._begin(tmp_path / "many-001", 16)
    with events.open("a") as file:
        file.write(dashboard._step(3, dashboard.BEFORE, 2e9))
    state = seen(Followed(tmp_path / "many-001"), state_of_run)
    assert (state["status"]["status"], state["broken"], state["groups"]) == ("running", 0, 2)
    assert [worker["step"] for worker in state["workers"]] == [59, 59, 59, 60, *[59] * 12]
    assert state["workers"][15]["host"] == "node2"
