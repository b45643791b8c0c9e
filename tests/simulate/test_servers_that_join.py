"""Model servers on machines that join while a run trains: they get shards where that evens the load, and copies. Whole runs in
simulated time; the auditor compares every copy with one process, bit by bit, and counts every batch and every answer."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

from tests.simulate.test_moving_shards import Heard
from tests.simulate.worlds import POLICIES, copied_topology, servers_topology
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.run.faults import Fault, drain, join, kill, pause, restart
from zmqtrain.simulate.explore import explore
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.schema import Topology

#: Seconds after a machine has asked to join: its server comes, is given a shard, gets a copy, and serves within 2 ms.
MOMENTS = (0.0002, 0.0005, 0.0008, 0.0011, 0.0014, 0.0018)


def shape(staleness: str, *, replicas: int = 1, shards: int = 4, job: str = "", count: int = 1) -> Topology:
    """Two hosts, of which one has the workers, too; each begins with two servers."""
    document = servers_topology(
        staleness,
        servers=2,
        epochs=True,
        count=count,
        job=f"{job}\nelastic = true",
        exchange=f"replicas = {replicas}\nmax_servers = {shards + 2}",
    ).model_dump(exclude_unset=True)
    document["exchange"]["shards"] = shards
    document["hosts"] = [{"name": "h1", "slots": 3, "address": "10.0.0.1"}, {"name": "s1", "slots": 1, "address": "10.0.0.2"}]
    return Topology.from_dict(document)


def run(topology: Topology, *faults: Fault, seed: int = 1) -> tuple[Result, Heard]:
    heard = Heard()
    result = simulate(topology, seed=seed, options=Options(faults=faults, on_event=heard.event))
    assert (result.ending.status, result.broken) == ("done", []), (result.ending.error, result.broken)
    return result, heard


@pytest.mark.parametrize("staleness", POLICIES)
@pytest.mark.parametrize("replicas", [0, 1])
def test_it_gets_a_shard_of_a_host_that_has_two_more(staleness: str, replicas: int) -> None:
    result, heard = run(shape(staleness, replicas=replicas), join("joined-1", at=0.03))
    assert heard.moved == [(0, "server/0", "server/4")]
    assert result.seconds < 1


def test_a_second_one_gets_a_shard_of_another_host() -> None:
    _, heard = run(shape('"sync"'), join("joined-1", at=0.03), join("joined-2", at=0.0301))
    assert heard.moved == [(0, "server/0", "server/4"), (1, "server/1", "server/5")]


def test_where_all_hosts_have_one_it_only_waits_for_a_loss() -> None:
    """Then it gets the copies that the lost server had, and in the end it may serve."""
    _, heard = run(shape('"async"', shards=2, count=2), join("joined-1", at=0.03))
    assert heard.moved == []
    _, heard = run(shape('"async"', shards=2, count=2), join("joined-1", at=0.03), kill("server/1", at=0.05))
    assert heard.moved == [(1, "server/0", "server/2")]
    _, heard = run(shape('"async"', shards=2, count=2), kill("server/1", at=0.03), join("joined-1", at=0.05))
    assert [(shard, to) for shard, _, to in heard.moved] == [(1, "server/2")]


@pytest.mark.parametrize("replicas", [0, 1])
def test_it_leaves_again_and_its_shard_goes_on(replicas: int) -> None:
    _, heard = run(shape('"async"', replicas=replicas), join("joined-1", at=0.03), drain("joined-1", at=0.05))
    assert [shard for shard, _, _ in heard.moved] == [0, 0]
    assert "agent/joined-1" in heard.left


@pytest.mark.parametrize("moment", MOMENTS)
def test_lost_or_asked_to_leave_while_it_comes(moment: float) -> None:
    at, staleness = 0.03 + moment, POLICIES[3 * (MOMENTS.index(moment) % 2)]
    for fault in (
        kill("joined-1", at=at),
        drain("joined-1", at=at),
        kill("server/0", at=at),
        kill("worker/1", at=at),
        restart("joined-1", at=at, after=0.002),
        restart(COORDINATOR, at=at, after=0.01),
    ):
        run(shape(staleness, job="restarts = 1"), join("joined-1", at=0.03), fault)


def test_with_a_merged_fc_server() -> None:
    document = copied_topology('"sync"', epochs=True, job="restarts = 1").model_dump(exclude_unset=True)
    document["exchange"] |= {"shards": 14, "max_servers": 15}
    faults = join("joined-1", at=0.03), kill("fc/0", at=0.0305), kill("server/3", at=0.05)
    _, heard = run(Topology.from_dict(document), *faults)
    assert (0, "server/0", "server/14") in heard.moved


def faults_of(draw: random.Random) -> Sequence[Fault]:
    faults, at = [], 0.0
    for _ in range(draw.randint(2, 5)):
        at += draw.uniform(0.005, 0.05)
        host, server, worker = f"joined-{draw.randint(1, 2)}", f"server/{draw.randrange(6)}", f"worker/{draw.randrange(3)}"
        of_all = (
            *(join(host, at=at),) * 4,
            drain(draw.choice((host, "s1")), at=at),
            kill(draw.choice((host, server, worker)), at=at),
            restart(draw.choice((host, worker)), at=at, after=0.005),
            pause(server, 0.01, at=at),
        )
        faults.append(draw.choice(of_all))
    return faults


@pytest.mark.parametrize("seed", range(int(os.environ.get("ZMQTRAIN_DRAWS", "4"))))
def test_random_losses_break_nothing(seed: int) -> None:
    run(shape(POLICIES[seed % 4], job="restarts = 3\neval_every = 3", count=2), *faults_of(random.Random(seed)), seed=seed)


def test_random_faults_break_nothing() -> None:
    assert [each.broken for each in explore(shape('"async"', job="restarts = 1"), range(3), faults="random") if each.broken] == []
