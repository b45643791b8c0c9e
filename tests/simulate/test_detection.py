"""How soon a lost process, host, or one that stands still is known, with default time-outs: in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from zmqtrain.run.faults import Fault, kill, pause
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.timeouts import Timeouts

TOPOLOGY = """
[job]
steps = {steps}
{job}
[[hosts]]
name = "h[1-{hosts}]"
address = "10.0.0.1"
slots = {slots}
[compute]
groups = {groups}
group_size = {size}
device = "modelled"
profile = "lenet"
shared_memory = {shared}
[exchange]
kind = "{kind}"
[network]
bandwidth = "1 Gbit/s"
latency = "100 us"
[simulation]
payload = "phantom"
time_limit = 1000
[observe]
trace_steps = 0
"""
TIMEOUTS = Timeouts.of(60.0)
#: A link is down when three heartbeats were not answered.
DOWN_S = 3 * TIMEOUTS.ping_s
AT_S = 0.02


class Found:
    """What is said of losses, and when."""

    def __init__(self) -> None:
        self.first: tuple[float, str, str] | None = None
        """The first loss: seconds after the fault, whose, and why."""
        self.steps: dict[str, list[int]] = {}
        self.joined: list[str] = []

    def event(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind in ("lost", "failed", "exit") and self.first is None and values.get("exit_code") != 0:
            self.first = asyncio.get_running_loop().time() - AT_S, str(values["peer"]), str(values["reason"])
        if kind == "join" and values.get("late"):
            self.joined.append(str(values["peer"]))

    def report(self, peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        self.steps.setdefault(peer, []).extend(event["step"] for event in events if event["kind"] == "step")


def run(fault: Fault, shape: str = "2x2", **how: Any) -> tuple[Result, Found]:
    """``shape``: hosts and their slots."""
    hosts, slots = (int(number) for number in shape.split("x"))
    told = {"steps": 150, "job": "", "groups": 1, "size": hosts * slots, "shared": "true", "kind": "allreduce", **how}
    topology = parse_topology(TOPOLOGY.format(hosts=hosts, slots=slots, **told))
    found = Found()
    result = simulate(topology, options=Options(faults=[fault], on_event=found.event, on_report=found.report))
    assert result.broken == []
    return result, found


@pytest.mark.parametrize(
    ("kind", "groups", "size", "shared"),
    [("allreduce", 1, 4, "true"), ("allreduce", 1, 4, "false"), ("model_server", 2, 2, "true"), ("gossip", 4, 1, "false")],
)
def test_a_killed_process_is_known_within_half_a_second(kind: str, groups: int, size: int, shared: str) -> None:
    _, found = run(kill("worker/1", at=AT_S), kind=kind, groups=groups, size=size, shared=shared)
    assert found.first is not None
    after_s, peer, _ = found.first
    assert peer == "worker/1"
    assert after_s < 0.5


@pytest.mark.parametrize(("kind", "groups", "size"), [("allreduce", 1, 4), ("model_server", 2, 2), ("gossip", 4, 1)])
def test_a_vanished_host_is_known_within_ten_seconds(kind: str, groups: int, size: int) -> None:
    _, found = run(kill("h2", at=AT_S), kind=kind, groups=groups, size=size)
    assert found.first is not None
    after_s, peer, reason = found.first
    assert (peer, reason) == ("agent/h2", "lost the host h2: its agent has been silent for 8 s")
    assert after_s < 10


def test_a_process_that_stands_still_is_lost_to_those_who_share_memory_with_it() -> None:
    """On one host, where no other worker has a link to it."""
    result, found = run(pause("worker/1", 10_000.0, at=AT_S), shape="1x4")
    assert found.first is not None
    after_s, peer, reason = found.first
    assert peer == "worker/1"
    assert "worker/1 on h1: it stands still: its process has not ended, but answers nothing" in reason
    assert after_s <= DOWN_S + TIMEOUTS.lost_s + TIMEOUTS.flush_s + 2 * TIMEOUTS.heartbeat_s
    assert result.ending.status == "failed"
    assert result.seconds < 90


def test_in_an_elastic_run_it_is_ended_and_a_new_process_takes_its_place() -> None:
    """It never continues where it stood: what it would send belongs to steps that are over."""
    job = 'timeout = "0.2 s"\nrestarts = 1'
    steps = 700
    result, found = run(pause("worker/2", 10_000.0, at=AT_S), shape="4x1", kind="gossip", groups=4, size=1, job=job, steps=steps)
    assert result.ending.status == "done"
    assert found.joined == ["worker/2"]
    assert found.first is not None
    assert "it stands still, or nothing gets through" in found.first[2]
    assert found.steps["worker/0"] == list(range(steps))
    taken = found.steps["worker/2"]
    assert taken[-1] == steps - 1
    assert taken != list(range(steps)), "it missed those of the time in which it stood still"
