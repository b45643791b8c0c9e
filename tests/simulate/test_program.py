"""`zmqtrain.simulate`, as programs and notebooks call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zmqtrain
from zmqtrain.errors import UsageError
from zmqtrain.run.faults import kill
from zmqtrain.testing import Options

CLUSTER: dict[str, Any] = {
    "job": {"name": "cluster", "steps": 4},
    "hosts": [{"name": "node[1-2]", "slots": 1}],
    "compute": {"groups": 2, "batch_size": 32, "device": "modelled", "profile": "alexnet"},
    "network": {"bandwidth": "10 Gbit/s", "latency": "50 us"},
}


def test_a_run_has_figures_and_a_picture(tmp_path: Path) -> None:
    run = zmqtrain.simulate(CLUSTER, steps=3)
    assert (run.ending.status, run.summary["status"], run.summary["steps"], run.broken) == ("done", "done", 3, [])
    assert [worker["step"] for worker in run.state["workers"]] == [2, 2]
    assert repr(run).startswith("cluster: done\nstep 3 of 3\n")
    assert {"cluster: done", "<svg"} == {each for each in ("cluster: done", "<svg") if each in run._repr_html_()}
    run.plot().save(tmp_path / "run.svg")
    assert "worker/1: compute" in (tmp_path / "run.svg").read_text()


async def test_a_running_loop_is_no_obstacle_and_callbacks_are_called() -> None:
    heard: list[str] = []
    options = Options(faults=[kill("worker/1", step=2)], on_report=lambda peer, events: heard.append(peer))
    run = zmqtrain.simulate(CLUSTER, options=options, elastic=False)
    assert run.ending.status == "failed"
    assert "worker/0" in heard
    assert "fault: " in repr(run)
    assert "failed: " in repr(run)
    assert any(member["peer"] == "worker/1" and member["state"] in ("lost", "failed") for member in run.state["members"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"groups": "auto"}, "cannot search"),
        ({"group": 2}, r"simulate\(\) has no setting 'group'; did you mean 'groups'"),
        ({"device": "cpu", "profile": None}, "has no task"),
    ],
)
def test_what_cannot_be_simulated_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        zmqtrain.simulate(CLUSTER, **settings)
