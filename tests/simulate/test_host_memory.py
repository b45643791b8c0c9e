"""Workers of one simulated host sum their gradients in its memory, as real ones do: the same sums, messages, times and ends."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from tests.exchange.counted import CountedEndpoint
from tests.simulate.test_training import STEP_S, Recipe
from tests.simulate.test_training import topology_of as training
from zmqtrain.arena import Arena
from zmqtrain.collectives.group import Group
from zmqtrain.errors import PeerLostError, PeerTimeoutError
from zmqtrain.exchange.base import Bucket
from zmqtrain.exchange.sums import HostSums
from zmqtrain.host.accumulator import Accumulator
from zmqtrain.host.member import ArenaMember, HostMember
from zmqtrain.host.team import LOOK_S, Team, Word
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.parallel.grid import Grid
from zmqtrain.plan.layers import stages
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.profiled import profile_layers
from zmqtrain.plan.setup import link_of
from zmqtrain.run.faults import kill, pause
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.simulate.memory import HostMemory, SimulatedMember
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.links import MEMORY_BYTE_S, NetworkModel
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.profile import Profile
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload

SIZES = (1000, 1, 50, 7)
NAMES = tuple(f"worker/{rank}" for rank in range(4))
Sizes: TypeAlias = dict[tuple[PeerId, Tag], list[int]]


def on_one_host(main: Callable[[list[SimulatedMember]], Any], size: int, timeout_s: float = 20.0) -> Any:
    """Run ``main(members)`` on virtual time."""

    async def within() -> Any:
        memory = HostMemory("h1", SimulatedNetwork(NetworkModel(), random.Random(1)))
        places = [memory.enter(NAMES[rank], rank) for rank in range(size)]
        return await main(
            [SimulatedMember(place, timeout_s, range(size), rank, NAMES[:size], 0) for rank, place in enumerate(places)]
        )

    return run_virtual(within(), limit_s=100)


class TestOneHost:
    @pytest.mark.parametrize(("in_place", "moved"), [(True, 4 + 1), (False, 4 + 4)])
    def test_a_bucket_takes_the_time_that_its_bytes_need(self, in_place: bool, moved: int) -> None:
        """All slices at once share the memory: each byte is read at every worker, and written once (or at every worker)."""
        numel = 25_000_000

        async def main(members: Sequence[SimulatedMember]) -> float:
            accumulators = [Accumulator(member, in_place=in_place) for member in members]
            loop, summed = asyncio.get_running_loop(), asyncio.Queue[Any]()
            for accumulator, started in [
                (each, asyncio.ensure_future(each.start([PhantomPayload(numel)], lambda *what: summed.put_nowait(what))))
                for each in accumulators
            ]:
                await started
                assert accumulator.member.size == 4
            begin = loop.time()
            for accumulator in accumulators:
                accumulator.produced(0)
            for _ in members:
                assert await summed.get() == (0, None)
            taken = loop.time() - begin
            for member in members:
                await member.leave(1)
            return taken

        assert on_one_host(main, 4) == pytest.approx(moved * 4 * numel * MEMORY_BYTE_S, rel=1e-6)

    def test_one_that_is_killed_is_noticed_as_a_real_one(self) -> None:
        async def main(members: Sequence[SimulatedMember]) -> float:
            loop = asyncio.get_running_loop()
            await asyncio.gather(*(member.share([]) for member in members))
            members[0].set(Word.ARRIVED, 2)
            waiting = asyncio.ensure_future(members[0].wait(Word.ARRIVED, 2, "the gradients of bucket 0"))
            await asyncio.sleep(1.0)
            members[1]._memory.lose("worker/1")
            members[1].set(Word.ARRIVED, 2)  # nothing that it still does has an effect
            with pytest.raises(
                PeerLostError, match="lost worker/1 while waiting for the gradients of bucket 0: its process has ended"
            ):
                await waiting
            return loop.time()

        assert 1.0 <= on_one_host(main, 2) <= 1.0 + LOOK_S

    def test_one_that_leaves_or_stands_still_is_named(self) -> None:
        async def main(members: Sequence[SimulatedMember]) -> None:
            await asyncio.gather(*(member.share([]) for member in members))
            with pytest.raises(PeerTimeoutError, match=r"worker/0 did not answer within 20(.0)? s while waiting for the sums"):
                await members[1].wait(Word.DONE, 2, "the sums of bucket 0")
            await members[1].leave(1)
            with pytest.raises(PeerLostError, match="lost worker/1 while waiting for the sums of bucket 0: it has left"):
                await members[0].wait(Word.DONE, 2, "the sums of bucket 0")
            why = PeerLostError("worker/7", "gone")
            members[0].abort(why)
            with pytest.raises(PeerLostError, match="worker/7"):
                await members[0].wait(Word.ARRIVED, 1, "what has come")

        on_one_host(main, 2)


class TestTheRealOne:
    """The same sums on real memory and threads beside those on simulated memory: equal bits, and equal messages between hosts."""

    @pytest.mark.parametrize("in_place", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    def test_bits_and_messages(self, dtype: torch.dtype, in_place: bool) -> None:
        arenas = [Arena.create(2, 1 << 20) for _ in range(2)]

        def real(host: int, rank: int) -> tuple[HostMember, Callable[[int], Tensor]]:
            arena = Arena.join(arenas[host].path, rank)
            team = Team(arena, range(2), rank, names=NAMES[2 * host : 2 * host + 2], timeout_s=20)

            def allocate(numel: int) -> Tensor:
                return torch.frombuffer(arena.allocate(numel * dtype.itemsize).memory, dtype=dtype)

            return ArenaMember(team), allocate

        found, sent = asyncio.run(sums_of(lambda: real, dtype, in_place))

        def simulated() -> Callable[[int, int], tuple[HostMember, Callable[[int], Tensor]]]:
            lan = SimulatedNetwork(NetworkModel(), random.Random(1))
            memories = [HostMemory(f"h{host}", lan) for host in range(2)]

            def make(host: int, rank: int) -> tuple[HostMember, Callable[[int], Tensor]]:
                names = NAMES[2 * host : 2 * host + 2]
                member = SimulatedMember(memories[host].enter(names[rank], rank), 20.0, range(2), rank, names, 0)
                return member, lambda numel: torch.zeros(numel, dtype=dtype)

            return make

        same, also_sent = run_virtual(sums_of(simulated, dtype, in_place))
        for arena in arenas:
            arena.close()
        assert sent == also_sent
        assert sum(map(len, sent[0].values())) >= len(SIZES) - 1, "slices go to the other host"
        for one, other in zip(found, same, strict=True):
            assert torch.equal(one, other)
        wanted = sum(gradient_of(rank, 0, dtype).double() for rank in range(4)) / 4
        torch.testing.assert_close(found[0].double(), wanted, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def gradient_of(rank: int, index: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(SIZES[index], generator=torch.Generator().manual_seed(10 * rank + index), dtype=torch.float64).to(dtype)


async def sums_of(make_hosts: Any, dtype: torch.dtype, in_place: bool) -> tuple[list[Tensor], list[Sizes]]:
    """Two hosts of two workers: every worker's sums, one after another, and what each has sent to whom."""
    network, make, workers = MemoryNetwork(), make_hosts(), []
    for rank, name in enumerate(NAMES):
        host, place = divmod(rank, 2)
        member, allocate = make(host, place)
        endpoint: Any = CountedEndpoint(network.endpoint(name))
        column = (NAMES[place], NAMES[place + 2])
        sums = HostSums(
            Group(endpoint, NAMES, rank, "workers"),
            member,
            Group(endpoint, column, host, f"workers/slice/{place}"),
            slices=2,
            scale=0.25,
            in_place=in_place,
        )
        buckets = []
        for index, numel in enumerate(SIZES):
            gradients = allocate(numel)
            gradients.copy_(gradient_of(rank, index, dtype))
            buckets.append(Bucket(index, TensorPayload.of(gradients), TensorPayload.of(gradients), 0, (f"w{index}",)))
        workers.append((endpoint, sums, buckets))
    await asyncio.gather(*(sums.begin(buckets) for _, sums, buckets in workers))
    for _, sums, buckets in workers:
        for bucket in buckets:
            sums.produced(bucket.index)
    await asyncio.gather(*(sums.sum(bucket, ("step", 0)) for _, sums, buckets in workers for bucket in buckets))
    found = [payload.tensor.clone() for _, sums, _ in workers for payload in sums.sums if isinstance(payload, TensorPayload)]
    for _, sums, buckets in workers:
        for bucket in buckets:
            sums.taken(bucket.index)
    for _, sums, _ in workers:
        await sums.stop()
    for endpoint, _, _ in workers:
        await endpoint.close()
    return found, [endpoint.sizes for endpoint, _, _ in workers]


HOSTS: dict[str, list[dict[str, Any]]] = {
    "1x2": [{"name": "h1", "slots": 2}],
    "1x4": [{"name": "h1", "slots": 4}],
    "2x2": [{"name": "h[1-2]", "slots": 2}],
}


class TestTraining:
    """Whole runs."""

    @pytest.mark.parametrize("clip_norm", [0.0, 1e6], ids=["in place", "own copies"])
    @pytest.mark.parametrize(("hosts", "groups", "size"), [("1x2", 1, 2), ("1x4", 2, 2), ("2x2", 2, 2), ("2x2", 1, 4)])
    def test_equals_one_process(self, tmp_path: Path, hosts: str, groups: int, size: int, clip_norm: float) -> None:
        """To summation order, in double precision; and within a host no gradient is a message."""
        topology = training(
            tmp_path,
            groups,
            size,
            hosts=HOSTS[hosts],
            exchange={"kind": "allreduce", "staleness": "async"},
            optimizer={"clip_norm": clip_norm},
        )
        result, recipe, events = run(topology)
        assert (result.ending.status, result.broken) == ("done", []), result.ending.error
        assert len(recipe.models) == groups * size
        for model in recipe.models:
            for mine, its in zip(recipe.alone().parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(its, mine, rtol=1e-12, atol=1e-13)
        over_network = run(with_memory(topology, shared=False))[2]
        assert sent_within(topology, events) < sent_within(topology, over_network)

    def test_gossip_sums_within_its_groups(self, tmp_path: Path) -> None:
        topology = training(tmp_path, 2, 2, hosts=HOSTS["2x2"], exchange={"kind": "gossip", "staleness": "async"})
        result, _, events = run(topology)
        assert (result.ending.status, result.broken) == ("done", []), result.ending.error
        assert sent_within(topology, events) < sent_within(topology, run(with_memory(topology, shared=False))[2])

    @pytest.mark.parametrize("kind", ["allreduce", "gossip", "averaging"])
    @pytest.mark.parametrize(("hosts", "groups"), [("1x4", 2), ("2x2", 2), ("2x2", 1)])
    def test_no_gradient_is_lost_or_doubled(self, tmp_path: Path, hosts: str, groups: int, kind: str) -> None:
        """With small payloads the auditor knows what all parameters must be at the end."""
        stated: list[object] = []
        topology = modelled(
            tmp_path,
            hosts,
            compute={"groups": groups, "group_size": 4 // groups, "overlap": True},
            exchange={"kind": kind},
            simulation={"payload": "small"},
        )
        options = Options(on_audit=lambda _, what, values: stated.append(values["wrong"]) if what == "values" else None)
        result = simulate(topology, options=options)
        assert (result.ending.status, result.broken) == ("done", []), result.ending.error
        assert stated
        assert not any(stated)

    def test_the_same_file_and_seed_give_the_same_events(self, tmp_path: Path) -> None:
        topology = modelled(tmp_path, "2x2", compute={"noise": {"kind": "normal", "spread": 0.1}})
        first, again = (json.dumps(reports_of(topology)[1]) for _ in range(2))
        assert first == again

    def test_one_killed_in_the_middle_of_a_bucket_ends_the_run(self, tmp_path: Path) -> None:
        """As it does for real: the lost one is named, and who waited for it in memory hears of it there."""
        topology = modelled(tmp_path, "1x4")
        middle = len(LAYERS) * LAYER_S + 0.375 * summing_s(topology)  # half of the second bucket's
        steps = [event["time"] for event in reports_of(topology)[1] if event["kind"] == "step"]
        begin = min(steps)
        result, _ = reports_of(topology, kill("worker/2", at=begin + middle))
        assert (result.ending.status, result.broken) == ("failed", [])
        assert result.ending.error is not None
        assert "worker/2" in json.dumps(result.ending.error)
        assert result.seconds < begin + middle + 15

    @pytest.mark.parametrize("peer", ["worker/0", "worker/1"])
    def test_threads_in_lockstep_end_with_a_lost_member(self, tmp_path: Path, peer: str) -> None:
        before = threading.active_count()
        topology = training(tmp_path, 1, 2, hosts=HOSTS["1x2"], exchange={"kind": "allreduce", "staleness": "async"})
        result, _, _ = run(topology, kill(peer, step=3))
        assert (result.ending.status, result.broken) == ("failed", [])
        assert peer in json.dumps(result.ending.error)
        assert threading.active_count() == before

    def test_one_that_is_paused_only_delays(self, tmp_path: Path) -> None:
        topology = training(tmp_path, 1, 2, hosts=HOSTS["1x2"], exchange={"kind": "allreduce", "staleness": "async"})
        result, recipe, _ = run(topology, pause("worker/1", 3.0, step=2))
        assert (result.ending.status, result.broken) == ("done", [])
        assert result.seconds > 3 + STEP_S
        for mine, its in zip(recipe.alone().parameters(), recipe.models[0].parameters(), strict=True):
            torch.testing.assert_close(its, mine, rtol=1e-12, atol=1e-13)


#: 160 MB of parameters, a bucket a layer.
LAYERS: list[dict[str, Any]] = [{"name": f"layer{n}", "numel": 10_000_000, "forward_s": 0.01, "backward_s": 0.02} for n in range(4)]
LAYER_S = 0.03


class TestPrice:
    """A simulated step is as long as the planner says, where nothing overlaps."""

    @pytest.mark.parametrize(("hosts", "buckets", "worst"), [("1x2", 4, 1e-3), ("1x4", 4, 1e-3), ("2x2", 1, 0.02)])
    def test_step(self, tmp_path: Path, hosts: str, buckets: int, worst: float) -> None:
        topology = modelled(tmp_path, hosts, layers=LAYERS[:buckets])
        assert exposed_s(topology, buckets) == pytest.approx(summing_s(topology), rel=worst)

    def test_a_bucket_is_on_the_network_while_the_next_is_added_up(self, tmp_path: Path) -> None:
        """Which the planner does not count."""
        topology = modelled(tmp_path, "2x2")
        one = modelled(tmp_path / "one", "2x2", layers=LAYERS[:1])
        assert 0.8 * summing_s(topology) < exposed_s(topology, 4) < 0.95 * summing_s(topology)
        assert exposed_s(topology, 4) < 4 * exposed_s(one, 1)

    def test_without_shared_memory_it_is_the_network(self, tmp_path: Path) -> None:
        topology = modelled(tmp_path, "1x2")
        steps = []
        for each in (topology, with_memory(topology, shared=False)):
            times = sorted(
                event["time"] for event in reports_of(each)[1] if event["kind"] == "step" and event["peer"] == "worker/0"
            )
            steps.append(times[-1] - times[0])
        assert steps[0] < steps[1]


def exposed_s(topology: Topology, layers: int) -> float:
    """By how much a simulated step is longer than its arithmetic."""
    ends = sorted(event["time"] for event in reports_of(topology)[1] if event["kind"] == "step" and event["peer"] == "worker/0")
    return (ends[-1] - ends[0]) / (len(ends) - 1) - layers * LAYER_S


def modelled(folder: Path, hosts: str, *, layers: Sequence[dict[str, Any]] = LAYERS, **sections: Any) -> Topology:
    """A group of all workers, that sums all its gradients at the end of a step."""
    folder.mkdir(exist_ok=True)
    profile = folder / "profile.json"
    profile.write_text(json.dumps({"layers": layers}))
    workers = sum(2 * each["slots"] if "-" in str(each["name"]) else each["slots"] for each in HOSTS[hosts])
    document: dict[str, Any] = {
        "job": {"steps": 6, "timeout": "20 s"},
        "hosts": HOSTS[hosts],
        "compute": {
            **{"groups": 1, "group_size": workers, "batch_size": 32, "bucket_size": "1 KiB", "overlap": False},
            **{"device": "modelled", "profile": str(profile)},
        },
        "exchange": {"kind": "allreduce"},
        "network": {"bandwidth": "10 Gbit/s", "latency": "50 us"},
        "simulation": {"payload": "phantom"},
        "data": {"shuffle": "none"},
    }
    for name, values in sections.items():
        document[name] = document.get(name, {}) | values
    return Topology.from_dict(document)


def summing_s(topology: Topology) -> float:
    """The planner's price of a step's sums."""
    assert topology.compute.profile is not None
    size = topology.compute.group_size
    pricing = Ours(per_host=topology.hosts[0].slots or 1)
    layers = stages(profile_layers(Profile.load(topology.compute.profile), 32 // size))
    placed = Placed("batch", Grid(1, size))
    link = link_of(topology)
    return sum(link.seconds(pricing.layer(stage, placed, 32, first=False).dw) for stage in layers)


def with_memory(topology: Topology, *, shared: bool) -> Topology:
    return topology.model_copy(update={"compute": topology.compute.model_copy(update={"shared_memory": shared})})


def reports_of(topology: Topology, *faults: Any, recipe: Recipe | None = None) -> tuple[Result, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    options = Options(
        faults=faults,
        task=None if recipe is None else recipe.task(),
        on_report=lambda peer, batch: events.extend({**event, "peer": peer} for event in batch),
    )
    result = simulate(topology, options=options)
    return result, events


def run(topology: Topology, *faults: Any) -> tuple[Result, Recipe, list[dict[str, Any]]]:
    """With torch."""
    recipe = Recipe()
    result, events = reports_of(topology, *faults, recipe=recipe)
    return result, recipe, events


def sent_within(topology: Topology, events: list[dict[str, Any]]) -> float:
    """Bytes from workers to other workers of their host."""
    placement = place(topology)
    host_of = {role.peer: role.host for role in placement.workers}
    return sum(
        nbytes
        for event in events
        if event["kind"] == "traffic"
        for peer, nbytes in event["values"]["sent"].items()
        if host_of.get(peer) == host_of.get(event["peer"]) is not None
    )
