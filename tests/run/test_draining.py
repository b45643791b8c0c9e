"""Which hosts may leave a run while it trains."""

from __future__ import annotations

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.membership.view import Member, View
from zmqtrain.run.draining import check_drain
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology

ALL = ["agent/h1", "agent/h2", "worker/0", "worker/1"]


def topology(kind: str, **job: object) -> Topology:
    hosts = [{"name": "h[1-2]", "slots": 2}]
    exchange = {"kind": kind, **({"shards": 1} if kind == "model_server" else {})}
    return Topology.from_dict({"job": job, "hosts": hosts, "compute": {"groups": 2}, "exchange": exchange})


def check(host: str, run: Topology, members: list[str] = ALL) -> None:
    placement = place(run)
    hosts = {role.peer: role.host for role in placement.roles}
    there = {peer: Member(peer, "", hosts.get(peer, peer[6:]), "worker" if peer in hosts else "agent", 0) for peer in members}
    check_drain(host, run, placement, View(3, True, there, {}))


def test_who_may_leave() -> None:
    check("h1", topology("gossip"))
    check("h1", topology("model_server"))


@pytest.mark.parametrize(
    ("host", "run", "members", "why"),
    [
        ("node11", topology("gossip"), ALL, "no host node11: it has h1, h2"),
        ("elsewhere", topology("gossip"), ALL, "no host elsewhere: it has h1, h2"),
        ("h1", topology("allreduce"), ALL, "cannot continue without h1: it is elastic only with elastic = true"),
        ("h1", topology("gossip", elastic=False), ALL, "cannot continue without h1"),
        ("h2", topology("model_server"), ALL, "cannot continue without h2: server/0 runs there"),
        ("h1", topology("gossip"), ["agent/h2", "worker/1"], "h1 is not in the run"),
        ("h1", topology("gossip"), ["agent/h1", "worker/0", "agent/h2"], "it has no worker on another host"),
    ],
)
def test_who_may_not(host: str, run: Topology, members: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check(host, run, members)
