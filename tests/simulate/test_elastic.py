"""Exchanges without servers go on without those who are lost, and with those who come back: whole runs in simulated time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.exchange.world import NumpyReplica
from zmqtrain.collectives.group import Group
from zmqtrain.exchange.gossip.exchange import GossipExchange, GossipSettings
from zmqtrain.exchange.members import FixedMembers
from zmqtrain.exchange.sums import NetworkSums
from zmqtrain.membership.environment import net_settings
from zmqtrain.run.faults import Fault, delay, join, kill, partition, pause, restart, slow
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.simulate.explore import Trial, explore
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.links import links_of
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Timeouts

STEPS = 60
#: Where many runs are made.
FEW = 80
TOPOLOGY = """
[job]
steps = {steps}
timeout = "5 s"
{job}
[[hosts]]
name = "h[1-4]"
address = "10.0.0.1"
slots = 1
[compute]
groups = 4
device = "modelled"
profile = "lenet"
bucket_size = "64 KiB"
[exchange]
kind = "gossip"
gossip = {{ exchange = "{exchange}", granularity = "{granularity}" }}
[network]
bandwidth = "1 Gbit/s"
latency = "100 us"
[simulation]
payload = "small"
time_limit = 120
[observe]
trace_steps = 0
"""
PAIR = """
[job]
[[hosts]]
name = "h[1-2]"
address = "10.0.0.1"
slots = 1
[network]
bandwidth = "100 Mbit/s"
latency = "100 us"
"""


def topology(*, exchange: str = "weights", granularity: str = "bucket", job: str = "", steps: int = STEPS) -> Topology:
    return parse_topology(TOPOLOGY.format(steps=steps, exchange=exchange, granularity=granularity, job=job))


class Heard:
    """What the roles of a run report."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}
        self.views: dict[str, list[tuple[int, tuple[str, ...]]]] = {}

    def __call__(self, peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "step":
                self.steps.setdefault(peer, []).append(event["step"])
            elif event["kind"] == "view":
                self.views.setdefault(peer, []).append((event["step"], tuple(event["values"]["members"])))


def run(faults: Sequence[Fault], **how: Any) -> tuple[Result, Heard]:
    heard = Heard()
    result = simulate(topology(**how), options=Options(faults=faults, on_report=heard))
    assert result.ending.status == "done", result.ending.error
    assert result.broken == []
    return result, heard


@pytest.mark.parametrize(
    ("exchange", "granularity"), [("weights", "bucket"), ("weights", "batch"), ("gradients", "bucket"), ("gradients", "batch")]
)
def test_survivors_of_a_kill_train_every_step(exchange: str, granularity: str) -> None:
    result, heard = run([kill("worker/1", step=50)], exchange=exchange, granularity=granularity, steps=FEW)
    for peer in ("worker/0", "worker/2", "worker/3"):
        assert heard.steps[peer] == list(range(FEW))
        assert heard.views[peer] == heard.views["worker/0"]
    ((_, members),) = heard.views["worker/0"]
    assert members == ("worker/0", "worker/2", "worker/3")
    assert result.seconds < 5  # its agent says at once that it is gone: nobody waits for the time-out


@pytest.mark.parametrize("target", ["h1", "h3"])
def test_a_host_that_is_lost_without_a_word_is_waited_for_until_the_time_out_and_no_longer(target: str) -> None:
    result, heard = run([kill(target, at=0.05)])
    gone = f"worker/{int(target[1]) - 1}"
    assert all(heard.steps[peer] == list(range(STEPS)) for peer in heard.steps if peer != gone)
    assert result.seconds < 10


def test_a_worker_that_stands_still_is_gone_on_without_and_ended() -> None:
    result, heard = run([pause("worker/2", 60.0, at=0.05)])
    assert all(heard.steps[peer] == list(range(STEPS)) for peer in heard.steps if peer != "worker/2")
    assert result.seconds < 10


@pytest.mark.parametrize("target", ["worker/0", "worker/2"])
def test_one_that_comes_back_takes_a_neighbour_s_weights_and_trains_on(target: str) -> None:
    _, heard = run([restart(target, at=0.04, after=0.015)])
    others = [f"worker/{rank}" for rank in range(4) if f"worker/{rank}" != target]
    assert all(heard.steps[peer] == list(range(STEPS)) for peer in others)
    first = heard.views[others[0]][-1][0]
    assert heard.views[others[0]][-1][1] == ("worker/0", "worker/1", "worker/2", "worker/3")
    assert heard.steps[target][-(STEPS - first) :] == list(range(first, STEPS))


@pytest.mark.parametrize("kind", ["gossip", "averaging", "allreduce"])
def test_if_workers_cannot_reach_each_other_but_the_coordinator_sees_all_one_of_them_is_replaced(kind: str) -> None:
    """Otherwise all would give up that wait for it, one after another: their links to it are lost for good."""
    shapes = {"gossip": topology, "averaging": averaging, "allreduce": allreduce}
    lost: list[str] = []

    def on_event(kind: str, values: Mapping[str, Any]) -> None:
        if kind == "lost":
            lost.append(values["peer"])

    cut = partition(["h2"], ["h3", "h4"], at=0.01, lasts=4.0)
    result = simulate(shapes[kind](job="restarts = 1"), options=Options(faults=[cut], on_event=on_event))
    assert (result.ending.status, result.broken) == ("done", [])
    assert lost in (["worker/1"], ["worker/3"])  # there may be a link to one of the others only


def test_an_agent_starts_its_lost_worker_again() -> None:
    _, heard = run([kill("worker/1", step=25)], job="restarts = 1")
    # It may be back before the others have agreed to go on without it.
    assert [len(members) for _, members in heard.views["worker/0"]] in ([3, 4], [4])
    assert heard.steps["worker/1"][-1] == STEPS - 1


def test_two_at_once_and_one_at_the_very_end() -> None:
    run([kill("worker/1", at=0.05), kill("worker/2", at=0.05)])
    run([kill("worker/3", step=STEPS - 1)])
    run([restart("worker/3", step=STEPS - 2, after=0.001)])


def test_only_one_is_left() -> None:
    _, heard = run([kill("worker/1", at=0.025), kill("worker/2", at=0.05), kill("worker/3", at=0.06)])
    assert heard.steps["worker/0"] == list(range(STEPS))


def test_a_host_that_comes_when_the_run_has_failed_already_is_refused() -> None:
    faults = [delay("h2", 300.0, at=0.0), kill("worker/0", at=0.0006)]
    result = simulate(topology(steps=FEW), options=Options(faults=faults))
    assert (result.ending.status, result.broken) == ("failed", [])
    assert result.ending.error is not None
    assert "worker/0 on h1 was killed" in result.ending.error["message"]


def test_random_faults_break_nothing() -> None:
    found: list[Trial] = list(explore(topology(steps=FEW), range(3), faults="random"))
    assert [each.broken for each in found if each.broken] == []


class SurvivingMembers(FixedMembers):
    """Two peers, of which one may be lost."""

    survives = True


@pytest.mark.parametrize("when_ms", range(1, 30, 2))
def test_a_bucket_is_averaged_as_a_whole_or_stays_local(when_ms: int) -> None:
    """The partner is killed somewhere in the middle of sending four buckets of 80 KB over 100 Mbit/s, 6.4 ms each."""

    async def run() -> list[str]:
        network = SimulatedNetwork(links_of(parse_topology(PAIR)), random.Random(1))
        settings = net_settings(Timeouts.of(2.0), "")
        nodes = [network.endpoint(f"worker/{rank}", f"h{rank + 1}", settings) for rank in range(2)]
        peers = ("worker/0", "worker/1")
        nodes[0].add_peer(peers[1], nodes[1].address)
        nodes[1].add_peer(peers[0], nodes[0].address)
        replicas = [NumpyReplica((10_000,) * 4, rank) for rank in range(2)]
        exchanges = [
            GossipExchange(
                node,
                SurvivingMembers(node, peers, timeout_s=5),
                NetworkSums(Group(node, (node.peer,), 0, f"group/{rank}")),
                frozenset(peers),
                GossipSettings(seed=1, timeout_s=5.0),
            )
            for rank, node in enumerate(nodes)
        ]
        for exchange, replica in zip(exchanges, replicas, strict=True):
            await exchange.start(replica, restored=True)
            exchange.begin_step(0)
        before = [[weight.copy() for weight in replica.weights] for replica in replicas]
        for exchange, replica in zip(exchanges, replicas, strict=True):
            for bucket in replica.buckets:
                replica.hand_over(exchange, bucket.index)
        await asyncio.sleep(when_ms / 1000)
        network.kill("worker/1")
        began = asyncio.get_running_loop().time()
        await exchanges[0].settle()
        assert asyncio.get_running_loop().time() - began <= 2.0  # not beyond the time-out
        found = []
        for mine, local, theirs in zip(replicas[0].weights, *before, strict=True):
            averaged = np.array_equal(mine, (local + theirs) / 2)
            assert averaged or np.array_equal(mine, local), "torn"
            found.append("averaged" if averaged else "local")
        await asyncio.gather(*(exchange.stop() for exchange in exchanges))
        await nodes[0].close()
        return found

    found = run_virtual(run(), seed=1, limit_s=60)
    assert found.count("averaged") in range(min(4, when_ms // 7) - 1, when_ms // 6 + 1)


AVERAGING = """
[exchange]
kind = "averaging"
every = {every}
averaging = {{ {averaging} }}
"""


def averaging(method: str = "", every: int = 4, job: str = "", steps: int = STEPS) -> Topology:
    text = TOPOLOGY.format(steps=steps, exchange="weights", granularity="bucket", job=job)
    start, end = text.index("[exchange]"), text.index("[network]")
    return parse_topology(text[:start] + AVERAGING.format(every=every, averaging=method) + text[end:])


METHODS = [
    "",
    'method = "elastic"',
    'method = "outer"',
    'method = "outer", overlap_steps = 2, fragments = 2',
    'method = "elastic", overlap_steps = 3',
    'method = "outer", deltas = "int8"',
]


def run_without_servers(faults: Sequence[Fault], shape: Topology) -> Heard:
    heard = Heard()
    result = simulate(shape, options=Options(faults=faults, on_report=heard))
    assert result.ending.status == "done", result.ending.error
    assert result.broken == []
    return heard


@pytest.mark.parametrize("method", METHODS)
def test_averaging_continues_without_a_lost_worker_and_with_one_that_comes_back(method: str) -> None:
    heard = run_without_servers([kill("worker/1", step=20), restart("worker/2", at=0.015, after=0.005)], averaging(method))
    assert heard.steps["worker/0"] == heard.steps["worker/3"] == list(range(STEPS))
    assert heard.views["worker/0"] == heard.views["worker/3"]
    assert [len(members) for _, members in heard.views["worker/0"]] == [3, 2, 3]
    assert heard.steps["worker/2"][-1] == STEPS - 1


@pytest.mark.parametrize("every", [1, 5])
def test_several_late_workers_that_could_ask_each_other_take_their_states_from_one_that_trains(every: int) -> None:
    """While worker/1 joins, worker/0 is lost and back again, and the members agree twice before worker/1 knows its first step."""
    faults = [restart("worker/0", at=0.0394, after=0.001), kill("worker/1", at=0.0381), kill("worker/2", step=96)]
    heard = run_without_servers(faults, averaging('method = "elastic"', every=every, job="restarts = 2", steps=120))
    assert heard.steps["worker/3"] == list(range(120))
    assert all(steps[-1] == 119 for steps in heard.steps.values())


def test_averaging_at_any_moment() -> None:
    for number, every in enumerate((1, 3)):
        shape = averaging(METHODS[number], every=every, steps=FEW)
        found = list(explore(shape, [10 * number], faults="random"))
        assert [each.broken for each in found if each.broken] == []


def allreduce(every: int = 1, job: str = "", steps: int = STEPS, epochs: int = 0, groups: int = 4, size: int = 1) -> Topology:
    text = TOPOLOGY.format(steps=steps, exchange="weights", granularity="bucket", job=f"elastic = true\n{job}")
    workers = f"groups = {groups}\ngroup_size = {size}"
    if epochs:
        text = text.replace(f"steps = {steps}", f"epochs = {epochs}")
        workers += "\nbatch_size = 3001"
    start, end = text.index("[exchange]"), text.index("[network]")
    exchange = f'[exchange]\nkind = "allreduce"\nevery = {every}\n'
    return parse_topology(text[:start].replace("groups = 4", workers) + exchange + text[end:])


@pytest.mark.parametrize("every", [1, 3])
def test_all_reduce_continues_without_a_lost_worker_and_with_one_that_comes_back(every: int) -> None:
    heard = run_without_servers([kill("worker/1", step=10), restart("worker/2", at=0.02, after=0.005)], allreduce(every))
    assert heard.steps["worker/0"] == heard.steps["worker/3"] == list(range(STEPS))
    assert [len(members) for _, members in heard.views["worker/0"]] == [3, 2, 3]
    assert heard.steps["worker/2"][-1] == STEPS - 1


def test_all_reduce_at_any_moment() -> None:
    """In the midst of sums: the survivors finish the step, or all of them give it up."""
    for number in (0, 2, 5, 7):
        at = 0.02 + 0.00037 * number
        run_without_servers([kill("worker/3", at=at)], allreduce(job="restarts = 1", steps=FEW))


@pytest.mark.parametrize("every", [1, 3])
def test_all_reduce_among_groups_of_several(every: int) -> None:
    """Two of one group, the first worker, and a whole group that comes back."""
    shape = allreduce(every, groups=2, size=2, job="restarts = 1", steps=FEW)
    for faults in (
        [kill("worker/0", step=8), kill("worker/1", step=8)],
        [kill("worker/0", step=0)],
        [kill("worker/2", step=20), kill("worker/3", step=21), kill("worker/1", step=FEW - 1)],
    ):
        heard = run_without_servers(faults, shape)
        assert all(steps[-1] == FEW - 1 for peer, steps in heard.steps.items() if peer != "worker/1")


@pytest.mark.parametrize("more", ["", 'on_resize = "linear"'])
def test_epochs_of_groups_of_several_end_with_all_their_samples(more: str) -> None:
    seeds = (1,) if more else (0, 2)
    found = explore(allreduce(epochs=1, groups=2, size=2, job=f"restarts = 1\n{more}"), seeds, faults="random")
    assert [each.broken for each in found if each.broken] == []


def test_those_who_join_train_as_much_as_the_others_and_the_auditor_knows_it() -> None:
    shape = allreduce(steps=FEW, job='max_workers = 6\non_resize = "linear"')
    result = simulate(shape, options=Options(faults=[join("joined-1", step=0)]))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error


@pytest.mark.parametrize("at", [0.04985, 0.04995])
def test_what_a_worker_leaves_that_is_lost_in_the_last_step_is_trained(at: float) -> None:
    """Its last sums may be under way when the others look for more to train; these agree on what follows."""
    shape = allreduce(epochs=1)
    result = simulate(shape, seed=71, options=Options(faults=[kill("worker/3", at=at)], usual_s=1.0))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error


def test_one_who_has_come_when_nothing_was_left_trains_what_another_leaves_after_that() -> None:
    """worker/5 waits for the state of step 4, which nobody was to train, when worker/2 is lost in its last step."""
    shape = allreduce(epochs=1, job="max_workers = 6")
    faults = (join("joined-1", at=0.0311), slow("worker/2", 20.0, at=0.0315), join("joined-2", at=0.0469), kill("worker/2", at=0.3))
    result = simulate(shape, options=Options(faults=faults))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error


def test_one_who_has_begun_as_a_copy_knows_what_others_have_left() -> None:
    """worker/2 is lost when worker/0 joins in the middle of a window, and those who train on have not completed it."""
    faults = [restart("worker/0", at=0.0064, after=0.00645), restart("worker/2", at=0.01188, after=0.0002)]
    for every in (1, 3):
        run_without_servers(faults, allreduce(every, groups=2, size=2, job="restarts = 2", steps=40))


@pytest.mark.parametrize("kind", ["gossip", "averaging", "allreduce"])
def test_one_that_comes_when_all_is_trained_leaves_in_good_order(kind: str) -> None:
    shapes = {"gossip": topology, "averaging": averaging, "allreduce": allreduce}
    shape = shapes[kind](steps=8, job="restarts = 1")
    usual_s, late = simulate(shape).seconds, 0
    for when in range(0, 10, 2):
        codes: list[int] = []
        kinds: list[str] = []

        def left(kind: str, values: Mapping[str, Any], codes: list[int] = codes) -> None:
            if kind == "exit" and values["peer"] == "worker/3":
                codes.append(values["exit_code"])

        def told(peer: str, events: Sequence[Mapping[str, Any]], kinds: list[str] = kinds) -> None:
            kinds.extend(event["kind"] for event in events if peer == "worker/3")

        kills = [kill("worker/3", at=usual_s * (0.6 + 0.04 * when))]
        result = simulate(shape, options=Options(faults=kills, on_event=left, on_report=told))
        assert (result.ending.status, result.broken) == ("done", [])
        assert set(codes) <= {-9, 0}
        late += len(codes) == 2 and kinds.count("start") < 2  # the second process has trained nothing
    assert late


@pytest.mark.parametrize("every", [1, 3])
def test_others_join_a_run_that_trains(every: int) -> None:
    """One alone; two of which one is lost; and one that is left when all are lost with which the run began."""
    shape = allreduce(every, groups=2, size=2, job="max_workers = 6", steps=60)
    heard = run_without_servers([join("joined-1", step=10)], shape)
    assert heard.steps["worker/4"][-1] == 59
    assert [len(members) for _, members in heard.views["worker/0"]] == [5]
    run_without_servers(
        [join("joined-1", step=5), join("joined-2", step=6), kill("worker/4", step=30), kill("worker/0", step=31)], shape
    )
    heard = run_without_servers([join("joined-2", step=2), *(kill(f"worker/{rank}", step=40) for rank in range(4))], shape)
    assert heard.steps["worker/5"][-1] == 59


def test_others_join_at_any_moment() -> None:
    """With another batch for as many workers in one of them: its model is that of a replay."""
    for seed in (2, 3):
        shape = allreduce(epochs=1, job="max_workers = 6" + seed % 2 * '\non_resize = "sqrt"')
        found = list(explore(shape, [seed], faults="random"))
        assert [each.broken for each in found if each.broken] == []


@pytest.mark.parametrize("restarts", [0, 1])
def test_one_that_is_to_be_started_again_before_its_agent_has_started_it_is_started_once(restarts: int) -> None:
    """There is nothing to kill, and another one with its name would meet it."""
    run([restart("worker/1", at=0.0, after=0.0)], job=f"restarts = {restarts}")
