"""Who may join a run while it trains."""

from __future__ import annotations

from typing import Any

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.membership.view import Member, View
from zmqtrain.run.joining import Places
from zmqtrain.topology.placement import Placement, backups_for, place
from zmqtrain.topology.schema import Topology


def topology(kind: str = "allreduce", **job: Any) -> Topology:
    document = {"job": job, "hosts": [{"name": "h[1-2]", "slots": 2}], "compute": {"groups": 2}, "exchange": {"kind": kind}}
    return Topology.from_dict(document)


def view(*agents: str, complete: bool = True) -> View:
    return View(3, complete, {f"agent/{host}": Member(f"agent/{host}", "", host, "agent", -1) for host in agents}, {})


def test_each_machine_gets_a_place_of_its_own() -> None:
    run = topology(elastic=True, max_workers=4)
    places = Places(run, place(run))
    join_s = run.job.timeouts.join_s
    assert [places.take(view("h1", "h2"), now) for now in (0.0, 1.0)] == ["joined-1", "joined-2"]
    with pytest.raises(UsageError, match="max_workers = 4"):
        places.take(view("h1", "h2"), 2.0)
    assert places.take(view("h1", "joined-1"), join_s + 2) == "joined-2", "nobody has come as this one"


@pytest.mark.parametrize(
    ("run", "here", "why"),
    [
        (topology(), view("h1"), "it is elastic only with elastic = true"),
        (topology(elastic=True), view("h1"), "beyond the 2 workers with which it began"),
        (topology(elastic=True, max_workers=3), view("h1", complete=False), "not all members with which it begins have joined"),
    ],
)
def test_who_may_not(run: Topology, here: View, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Places(run, place(run)).take(here, 0.0)


@pytest.mark.parametrize(
    ("kind", "job", "why"),
    [
        ("gossip", {"max_workers": 4}, "max_workers is for all-reduce"),
        ("allreduce", {"max_workers": 4}, "max_workers is for elastic runs"),
        ("allreduce", {"max_workers": 1, "elastic": True}, "max_workers is 1, but the run has 2 workers"),
        ("allreduce", {"max_workers": 1000, "elastic": True}, "fewer than that"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind: str, job: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        topology(kind, **job)


def test_places_travel_with_the_placement() -> None:
    run = topology(elastic=True, max_workers=4)
    placement = place(run)
    assert [(role.peer, role.host, role.group) for role in placement.spares] == [
        ("worker/2", "joined-1", 2),
        ("worker/3", "joined-2", 3),
    ]
    assert Placement.from_dict(placement.to_dict()) == placement
    assert placement.world_size == 2
    assert placement.group_members(3) == ("worker/3",)
    assert placement.role("worker/3").host == "joined-2"


# Model servers.


def servers(most: int | None, **exchange: Any) -> Topology:
    document: dict[str, Any] = {"job": {}, "hosts": [{"name": "h[1-2]", "slots": 2}], "compute": {"groups": 2}}
    more = {} if most is None else {"max_servers": most}
    return Topology.from_dict({**document, "exchange": {"kind": "model_server", "shards": 2, "replicas": 1, **exchange, **more}})


def test_model_servers_have_places_too() -> None:
    run = servers(4)
    placement = place(run)
    assert [(role.peer, role.kind, role.host) for role in placement.spares] == [
        ("server/2", "server", "joined-1"),
        ("server/3", "server", "joined-2"),
    ]
    assert [role.peer for role in placement.server_roles] == ["server/0", "server/1"]
    assert [role.peer for role in placement.everyone] == ["worker/0", "worker/1"]
    assert backups_for(placement, "server/2") == ("server/3", "server/0", "server/1")
    assert Placement.from_dict(placement.to_dict()) == placement
    places = Places(run, placement)
    assert [places.take(view("h1", "h2"), now) for now in (0.0, 1.0)] == ["joined-1", "joined-2"]
    with pytest.raises(UsageError, match="max_servers = 4"):
        places.take(view("h1", "h2"), 2.0)
    without = servers(None)
    with pytest.raises(UsageError, match=r"\[exchange\] max_servers says so"):
        Places(without, place(without)).take(view("h1"), 0.0)


@pytest.mark.parametrize(
    ("exchange", "why"),
    [
        ({"replicas": 0}, "runs whose shards can move"),
        ({"replicas": 0, "shards": 1}, "runs whose shards can move"),
        ({"shards": 6}, "max_servers is 4, but the run has 6 model servers"),
        ({"kind": "gossip", "shards": 1, "replicas": 0}, "max_servers is for model servers"),
    ],
)
def test_more_servers_than_make_sense_are_refused(exchange: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        servers(4, **exchange)
