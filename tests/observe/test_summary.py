"""The summary is a fold of events: what comes in gives what goes out, with no clock and no files."""

from __future__ import annotations

from typing import Any

import pytest

from zmqtrain.observe.live import closing_lines
from zmqtrain.observe.summary import Summary


def add(summary: Summary, peer: str, kind: str, step: int | None, time: float, values: dict[str, Any]) -> None:
    role, _, rank = peer.partition("/")
    summary.add(peer, {"kind": kind, "role": role, "rank": int(rank), "step": step, "time": time, "values": values})


def step(summary: Summary, rank: int, number: int, time: float, **values: Any) -> None:
    """A step event as the training loop records it."""
    told = {"loss": 1.0, "samples": 32, "seconds": 0.5, "exposed_s": 0.1, "staleness": None, "staleness_max": None, **values}
    add(summary, f"worker/{rank}", "step", number, time, told)


def test_empty_run_has_every_field() -> None:
    values = Summary().to_dict()
    assert values["steps"] == values["samples"] == values["bytes_sent"] == 0
    # What was never measured is not 0.
    assert values["samples_per_s"] is None
    assert values["step_s"] == values["exposed_communication_s"] == {"median": None, "p90": None}
    assert values["staleness"] == {"mean": None, "max": None, "histogram": {}}
    assert values["eval"] == {}
    assert values["replica_spread"] is None


def test_a_run_without_a_step_says_no_more_than_that() -> None:
    first, *others = closing_lines(Summary(), 2.0, "runs/x-001")
    assert first == "done in 2.0 s: 0 steps, 0 samples"
    assert not [line for line in others if "median" in line]


def resumed(summary: Summary, at: int) -> Summary:
    for rank in range(2):
        add(summary, f"worker/{rank}", "start", at, 100.0, {"steps": 60, "restored": True})
    add(summary, "worker/2", "start", at + 1, 102.0, {"steps": 60, "restored": True})  # it has joined later
    return summary


def test_a_resumed_run_says_which_steps_are_its_own() -> None:
    summary = resumed(Summary(), 40)
    assert closing_lines(summary, 2.0, "")[0] == "done in 2.0 s: nothing was left to train after step 40"
    step(summary, 0, 40, 101.0)
    assert closing_lines(summary, 2.0, "")[0].startswith("done in 2.0 s: step 41, 32 samples")
    step(summary, 1, 41, 102.0)
    assert closing_lines(summary, 2.0, "")[0].startswith("done in 2.0 s: steps 41 to 42, 64 samples")
    assert summary.to_dict()["resumed_at"] == 40
    assert resumed(Summary(), 0).to_dict()["resumed_at"] is None


def test_steps_are_a_groups_and_samples_are_all_workers() -> None:
    summary = Summary()
    for number in range(3):
        step(summary, 0, number, 101.0 + number)
        step(summary, 1, number, 101.0 + number, seconds=1.0)
    values = summary.to_dict()
    assert values["steps"] == 3
    assert values["samples"] == 6 * 32
    # From the begin of the first step (the slower worker's) to the end of the last.
    assert values["samples_per_s"] == pytest.approx(192 / 3.0)
    assert values["loss"] == 1.0


def test_median_and_p90() -> None:
    summary = Summary()
    for number in range(10):
        step(summary, 0, number, 100.0 + number, seconds=(number + 1) / 10, exposed_s=(number + 1) / 100)
    values = summary.to_dict()
    assert values["step_s"] == {"median": pytest.approx(0.55), "p90": pytest.approx(0.9)}
    assert values["exposed_communication_s"] == {"median": pytest.approx(0.055), "p90": pytest.approx(0.09)}


def test_an_fc_server_tells_of_itself() -> None:
    summary = Summary()
    assert "fc" not in summary.to_dict()
    told = {"updates": 8, "busy": 0.5, "samples": 64, "staleness": {"0": 8}, "staleness_mean": 0.0, "staleness_max": 0}
    add(summary, "server/0", "server", None, 1.0, {"staleness": {"3": 8}})
    add(summary, "fc/0", "fc", None, 1.0, told)
    values = summary.to_dict()
    assert values["fc"] == {"updates": 8, "busy": 0.5, "staleness": {"mean": 0.0, "max": 0}}
    assert values["staleness"]["mean"] == 3, "convolutions' alone"


def test_newest_evaluation_counts() -> None:
    summary = Summary()
    add(summary, "worker/0", "eval", 10, 1.0, {"seconds": 0.1, "eval_loss": 0.9, "eval_accuracy": 0.5})
    add(summary, "worker/0", "eval", 20, 2.0, {"seconds": 0.1, "eval_accuracy": 0.75})
    assert summary.to_dict()["eval"] == {"eval_loss": 0.9, "eval_accuracy": 0.75}


def test_staleness_as_servers_count_it() -> None:
    """Each server sends its histogram so far; its newest one counts, and servers add up."""
    summary = Summary()
    add(summary, "server/0", "server", None, 1.0, {"staleness": {"0": 1}})
    add(summary, "server/0", "server", None, 2.0, {"staleness": {"0": 2, "1": 4}})
    add(summary, "server/1", "server", None, 2.0, {"staleness": {"3": 2}})
    step(summary, 0, 0, 1.0, staleness=0.5, staleness_max=3)  # what workers see of it is in there already
    staleness = summary.to_dict()["staleness"]
    assert staleness["histogram"] == {"0": 2, "1": 4, "3": 2}
    assert staleness["mean"] == pytest.approx(10 / 8)
    assert staleness["max"] == 3


def test_staleness_as_workers_see_it() -> None:
    """Where no server counts: means of the training loop, lists of a session."""
    summary = Summary()
    step(summary, 0, 0, 1.0, staleness=1.0, staleness_max=2)
    step(summary, 0, 1, 2.0, staleness=2.0, staleness_max=4)
    staleness = summary.to_dict()["staleness"]
    assert staleness["mean"] == pytest.approx(1.5)
    assert staleness["max"] == 4
    listed = Summary()
    step(listed, 0, 0, 1.0, staleness=[0, 1, 2])
    step(listed, 0, 1, 2.0, staleness=[])
    assert listed.to_dict()["staleness"] == {"mean": 1.0, "max": 2, "histogram": {"0": 1, "1": 1, "2": 1}}


def test_traffic_of_all_roles_adds_up_and_is_counted_once() -> None:
    summary = Summary()
    add(summary, "worker/0", "traffic", None, 1.0, {"bytes_sent": 100})
    add(summary, "worker/0", "traffic", None, 2.0, {"bytes_sent": 300})
    add(summary, "server/0", "traffic", None, 2.0, {"bytes_sent": 50})
    assert summary.to_dict()["bytes_sent"] == 350


def test_replica_spread_is_the_largest_that_was_reported() -> None:
    summary = Summary()
    add(summary, "worker/0", "finish", 3, 1.0, {"replica_spread": 0.25})
    add(summary, "worker/1", "finish", 3, 1.0, {"replica_spread": None})
    assert summary.to_dict()["replica_spread"] == 0.25


def test_loss_leaves_out_what_is_no_number() -> None:
    summary = Summary()
    step(summary, 0, 0, 1.0, loss=2.0)
    step(summary, 1, 0, 1.0, loss=float("nan"))
    assert summary.to_dict()["loss"] == 2.0


def test_checkpoints_that_did_not_come_are_named() -> None:
    summary = Summary()
    assert summary.to_dict()["checkpoints"] == {"complete": 0, "newest": None, "failed": []}

    def told(kind: str, step: int) -> None:
        summary.add(
            "coordinator", {"kind": kind, "role": "coordinator", "rank": None, "step": step, "values": {"reason": f"why {step}"}}
        )

    told("checkpoint complete", 10)
    told("checkpoint late", 20)
    told("checkpoint failed", 30)
    assert [each["step"] for each in summary.to_dict()["checkpoints"]["failed"]] == [20, 30]
    told("checkpoint complete", 20)  # late, but there
    found = summary.to_dict()["checkpoints"]
    assert found == {"complete": 2, "newest": 20, "failed": [{"step": 30, "reason": "why 30"}]}
