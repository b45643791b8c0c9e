"""Figures of losses, of hosts that leave and of shards that move, from hand-written events and from simulated runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.simulate.worlds import servers_topology
from zmqtrain.observe.resizing import Resizing
from zmqtrain.run.faults import Fault, drain, kill, restart
from zmqtrain.simulate.run import Options, simulate


def event(kind: str, time: float, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, "values": values}


def figures_of(*faults: Fault) -> dict[str, Any] | None:
    found = Resizing()

    def hear(kind: str, values: Mapping[str, Any]) -> None:
        found.add(event(kind, values.get("time", 0.0), **values))

    def report(_peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for each in events:
            found.add({**each, "values": each.get("values") or {}})

    topology = servers_topology('"sync"', servers=3, epochs=True, exchange="replicas = 1", job="elastic = true")
    result = simulate(topology, options=Options(faults=faults, on_event=hear, on_report=report))
    assert (result.ending.status, result.broken) == ("done", [])
    return found.to_dict()


def test_a_run_in_which_all_stay_has_none() -> None:
    assert figures_of() is None


def test_losses_departures_and_returns() -> None:
    found = figures_of(drain("s2", at=0.012), kill("server/0", at=0.03), restart("worker/1", at=0.05, after=0.02))
    assert found is not None
    assert found["lost"] == {"server": 1, "worker": 1}
    assert (found["drained"], found["came"]) == (["s2"], 1)
    assert found["moved"] >= 1


def test_it_goes_on_when_workers_have_agreed_and_when_the_next_server_serves() -> None:
    found = Resizing()
    found.add(event("lost", 10.0, peer="worker/1"))
    found.add(event("lost", 10.2, peer="worker/2"))
    found.add(event("lost", 10.3, peer="server/0"))
    found.add(event("took over", 10.4, shard=0))
    found.add(event("view", 11.0, members=["worker/0"]))
    found.add(event("view", 11.1, members=["worker/0"]))  # another worker says the same
    found.add(event("lost", 20.0, peer="agent/h2"))
    figures = found.to_dict()
    assert figures is not None
    assert figures["lost"] == {"server": 1, "worker": 2}
    assert figures["went_on_s"] == {"median": 0.55, "max": 1.0} or abs(figures["went_on_s"]["median"] - 0.55) < 1e-9


def test_the_roles_of_a_host_that_was_asked_to_leave_are_not_lost() -> None:
    found = Resizing()
    found.add(event("drain", 1.0, host="h2", roles=["worker/1", "server/1"]))
    found.add(event("moved", 1.5, shard=1))
    found.add(event("lost", 2.0, peer="worker/1"))
    assert found.to_dict() == {"lost": {}, "drained": ["h2"], "came": 0, "moved": 1, "went_on_s": None}
    found.add(event("join", 3.0, peer="worker/1", late=True))
    found.add(event("lost", 4.0, peer="worker/1"))
    figures = found.to_dict()
    assert figures is not None
    assert (figures["lost"], figures["came"]) == ({"worker": 1}, 1)
