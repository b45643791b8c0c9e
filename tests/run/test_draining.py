"""Which hosts may leave a run while it trains."""

from __future__ import annotations

from typing import Any, cast

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.membership.view import Member, View
from zmqtrain.run.draining import check_drain
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology

ALL = ["agent/h1", "agent/h2", "worker/0", "worker/1"]
TWICE = {"shards": 2, "replicas": 1}


def topology(kind: str, *, exchange: dict[str, object] | None = None, **job: object) -> Topology:
    hosts = [{"name": "h[1-2]", "slots": 2}]
    exchange = {"kind": kind, **({"shards": 1} if kind == "model_server" else {}), **(exchange or {})}
    return Topology.from_dict({"job": job, "hosts": hosts, "compute": {"groups": 2}, "exchange": exchange})


def check(host: str, run: Topology, members: list[str] = ALL, leaving: tuple[str, ...] = ()) -> None:
    placement = place(run)
    hosts = {role.peer: role.host for role in placement.roles}
    kinds = {peer: peer.partition("/")[0] for peer in members}
    there = {peer: Member(peer, "", hosts.get(peer, peer[6:]), cast(Any, kinds[peer]), 0) for peer in members}
    check_drain(host, run, placement, View(3, True, there, {}, leaving=leaving))


def test_who_may_leave() -> None:
    check("h1", topology("gossip"))
    check("h1", topology("model_server"))
    check("h2", topology("model_server", exchange=TWICE), [*ALL, "server/0", "server/1"])


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


def test_a_host_stays_that_has_the_last_server() -> None:
    with pytest.raises(UsageError, match="server/0 runs there, and no other host has a model server that could have its shard"):
        check("h2", topology("model_server", exchange=TWICE), [*ALL, "server/0"])
    with pytest.raises(UsageError, match="no other host has a model server that could have its shard"):
        check("h2", topology("model_server", exchange=TWICE), [*ALL, "server/0", "server/1"], leaving=("server/1",))


def test_a_host_stays_without_which_no_group_is_whole() -> None:
    run = Topology.from_dict(
        {
            "job": {"elastic": True},
            "hosts": [{"name": "h[1-3]", "slots": 2}],
            "compute": {"groups": 3, "group_size": 2, "grid": "2x1"},
            "exchange": {"kind": "averaging"},
        }
    )
    placement = place(run)

    def ask(host: str, ready: int) -> None:
        there = {f"agent/{name}": Member(f"agent/{name}", "", name, "agent", -1) for name in placement.hosts}
        for role in placement.workers:
            there[role.peer] = Member(role.peer, "", role.host, "worker", role.index, role.group, ready=role.index < ready)
        check_drain(host, run, placement, View(3, True, there, {}))

    ask("h1", 6)
    ask("h3", 2)
    with pytest.raises(UsageError, match="each group that trains has a worker there"):
        ask("h1", 2)
