"""Every gradient is applied exactly once, whatever the order; what is wrong is refused and the server lives."""

from __future__ import annotations

import asyncio
import gc
import random
from functools import partial

import pytest
import torch

from tests.server.world import LinearReplica, World, exchange_once
from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.pieces import Piece
from zmqtrain.exchange.server_messages import PushMeta, push_tag
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.server.shard import GroupSum, TensorEntry
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

pytestmark = pytest.mark.virtual_time

#: Parameters fall by the gradient, so with integers all sums are exact.
SUBTRACT = partial(torch.optim.SGD, lr=1.0)


def integer_gradient(replica: LinearReplica, worker: int, step: int) -> None:
    for index, gradient in enumerate(replica.gradients):
        gradient.copy_(torch.arange(gradient.numel()) % 5 + 10 * worker + 3 * step + index)


async def count(exchange, replica, worker: int, steps: int, chance: random.Random) -> None:
    await exchange.start(replica)
    for step in range(steps):
        integer_gradient(replica, worker, step)
        exchange.begin_step(step)
        buckets = list(replica.buckets)
        chance.shuffle(buckets)
        for bucket in buckets:
            exchange.bucket_ready(bucket)
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        await exchange.end_step()
        await exchange.settle()
    await exchange.stop()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{"policy": "async"}, {"policy": "bound", "bound": 2}, {"policy": "async", "snapshot": True}])
async def test_all_gradients_are_applied_and_none_twice(settings, seed: int) -> None:
    workers, steps, sizes = 3, 4, (7, 101, 1)
    world = World(workers, 1, 2, split_bytes=72, **settings)
    replicas = [LinearReplica(SUBTRACT, sizes=sizes) for _ in range(workers)]
    for replica in replicas:
        for parameter in replica.parameters:
            parameter.zero_()
    chance = random.Random(seed)
    await world.run(*(count(world.exchanges[w], replicas[w], w, steps, chance) for w in range(workers)))
    pieces = sum(len(server.entries) for server in world.servers)
    assert sum(server.updates for server in world.servers) == workers * steps * pieces
    assert sum(sum(server.staleness.values()) for server in world.servers) == workers * steps * pieces
    expected = LinearReplica(SUBTRACT, sizes=sizes)
    sums = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    for worker in range(workers):
        for step in range(steps):
            integer_gradient(expected, worker, step)
            for total, gradient in zip(sums, expected.gradients, strict=True):
                total -= gradient
    for server in world.servers:
        for entry in server.entries.values():
            want = sums[entry.piece.bucket][entry.piece.start : entry.piece.stop]
            assert torch.equal(entry.values.detach(), want)


@pytest.mark.parametrize("policy", ["sync", "async"])
async def test_none_is_lost_or_doubled_when_links_drop(policy: str) -> None:
    """Links break while gradients and parameters are on the way, and come back."""
    workers, steps, size = 2, 6, 40_000
    network = MemoryNetwork(lambda source, destination, lane, nbytes: 0.002)
    world = World(workers, 1, 2, policy=policy, split_bytes=100_000, network=network)
    replicas = [LinearReplica(SUBTRACT, sizes=(size, 7)) for _ in range(workers)]
    for parameter in replicas[0].parameters:
        parameter.zero_()
    over = asyncio.Event()

    async def worker(rank: int) -> None:
        await count(world.exchanges[rank], replicas[rank], rank, steps, random.Random(rank))
        over.set()

    async def trouble() -> None:
        chance = random.Random(7)
        while not over.is_set():
            await asyncio.sleep(chance.uniform(0.002, 0.02))
            network.drop_link(f"worker/{chance.randrange(workers)}", f"server/{chance.randrange(2)}")

    await world.run(*(worker(rank) for rank in range(workers)), trouble())
    resent = sum(endpoint.statistics()["resent_bytes"] for endpoint in world.endpoints.values())
    assert resent > 0, "something was lost on the way and sent again"
    pieces = sum(len(server.entries) for server in world.servers)
    times = 1 if policy == "sync" else workers
    assert sum(server.updates for server in world.servers) == times * steps * pieces
    want = torch.zeros(size, dtype=torch.float64)
    for rank in range(workers):
        for step in range(steps):
            integer_gradient(replicas[0], rank, step)
            want -= replicas[0].gradients[0] / (workers if policy == "sync" else 1)
    for server in world.servers:
        for entry in server.entries.values():
            if entry.piece.bucket == 0:
                assert torch.equal(entry.values.detach(), want[entry.piece.start : entry.piece.stop])


async def test_a_server_keeps_nothing_of_what_came() -> None:
    """After some steps it holds its pieces, in the memory that it began with, and no gradients."""
    world = World(2, 1, 1, policy="sync")
    replicas = [LinearReplica(SUBTRACT) for _ in range(2)]
    addresses: list[set[int]] = []
    alive: list[int] = []

    async def worker(rank: int) -> None:
        await world.exchanges[rank].start(replicas[rank])
        for step in range(6):
            await exchange_once(world.exchanges[rank], replicas[rank], step)
            await asyncio.sleep(0.02)  # acknowledgements come
            if rank or step not in (2, 5):
                continue
            addresses.append({entry.values.data_ptr() for entry in world.servers[0].entries.values()})
            gc.collect()
            alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        await world.exchanges[rank].stop()

    await world.run(worker(0), worker(1))
    assert addresses[0] == addresses[1]
    assert alive[1] <= alive[0]


async def test_a_group_too_far_ahead_waits_until_the_slowest_moves_and_no_longer() -> None:
    world = World(2, 1, 2, policy="bound", bound=1)
    replicas = [LinearReplica(SUBTRACT) for _ in range(2)]
    fast_steps, slow_may_go = 0, asyncio.Event()

    async def fast() -> None:
        nonlocal fast_steps
        await world.exchanges[0].start(replicas[0])
        for step in range(3):
            await exchange_once(world.exchanges[0], replicas[0], step)
            fast_steps += 1
        await world.exchanges[0].stop()

    async def slow() -> None:
        await world.exchanges[1].start(replicas[1])
        await slow_may_go.wait()
        await exchange_once(world.exchanges[1], replicas[1], 0)
        while fast_steps < 2:  # noqa: ASYNC110 - one step of the slow group lets the fast one go on
            await asyncio.sleep(0)
        await world.exchanges[1].stop()  # and leaving frees it for good

    async def release() -> None:
        while fast_steps < 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0.03)
        assert fast_steps == 1, "two steps ahead of a group that pushed nothing"
        slow_may_go.set()

    await world.run(fast(), slow(), release())
    assert fast_steps == 3


@pytest.mark.parametrize("policy", ["async", "bound"])
async def test_snapshots_are_of_one_version(policy: str) -> None:
    """All gradients are ones: a parameter tells how many updates it has seen."""
    groups, steps = 3, 5
    world = World(groups, 2, 3, policy=policy, bound=2, snapshot=True)
    replicas = [LinearReplica(SUBTRACT) for _ in world.workers]
    chance = random.Random(5)
    reads: list[set[float]] = []

    async def worker(rank: int) -> None:
        exchange, replica = world.exchanges[rank], replicas[rank]
        for parameter in replica.parameters:
            parameter.zero_()
        await exchange.start(replica)
        for step in range(steps):
            for gradient in replica.gradients:
                gradient.fill_(0.5)  # two workers a group
            for _ in range(chance.randrange(30)):
                await asyncio.sleep(0)
            await exchange_once(exchange, replica, step)
            reads.append({float(value) for parameter in replica.parameters for value in parameter})
        await exchange.stop()

    await world.run(*(worker(rank) for rank in range(len(world.workers))))
    assert len(reads) == groups * 2 * steps
    assert all(len(versions) == 1 for versions in reads)
    assert min(min(versions) for versions in reads) == -groups * steps


async def test_bad_pushes_are_refused_and_the_server_lives() -> None:
    world = World(1, 1, 1, policy="async", split_bytes=1 << 20)
    replica = LinearReplica(SUBTRACT)
    stranger = world._open("stranger")
    refusals: list[str] = []
    told = asyncio.Event()

    async def refused(caller: str, tag: list[str | int], reason: str) -> None:
        refusals.append(reason)
        told.set()

    stranger.serve("refused", refused)
    seven = TensorPayload.of(torch.ones(7, dtype=torch.float64), PushMeta(0, 0).to_value())

    async def bad(tag, payload: object, reason: str) -> None:
        told.clear()
        await stranger.send("server/0", tag, payload)
        await told.wait()
        assert reason in refusals.pop()

    async def worker() -> None:
        exchange = world.exchanges[0]
        await exchange.start(replica)
        before = [parameter.clone() for parameter in replica.parameters]
        await bad(push_tag(0, 0), seven, "stranger pushed piece 0 of group 0, which only worker/0 may push")
        await bad(push_tag(99, 0), seven, "does not hold piece 99; it holds 0, 1, 2, 3")
        await bad(("push",), seven, "('push',) is not a tag of a push")
        await bad(push_tag(0, 0), ValuePayload("garbage"), "'garbage'")
        await bad(push_tag(0, 0), ValuePayload([7, 0]), "there is no group 7; groups are 0 to 0")
        await bad(push_tag(0, 0), ValuePayload({"codec": "int8", "numel": 10**12}), "stands for 1000000000000 elements, not 7")
        await exchange_once(exchange, replica, 0)
        assert all(torch.equal(a, b) for a, b in zip(replica.parameters, before, strict=True)), "the gradients were zeros"
        await exchange.stop()

    await world.run(worker())
    assert world.servers[0].updates == 4


@pytest.mark.parametrize(
    ("step", "payload", "reason"),
    [
        (0, TensorPayload.of(torch.ones(7, dtype=torch.float64), [0, 0]), "group 0 has already pushed step 0; its next step is 1"),
        (5, TensorPayload.of(torch.ones(7, dtype=torch.float64), [0, 0]), "group 0 pushed step 5, but its next step is 1"),
        (1, TensorPayload.of(torch.ones(8, dtype=torch.float64), [0, 0]), "8 elements of float64 as piece 0, but it has 7"),
        (1, TensorPayload.of(torch.ones(7), [0, 0]), "7 elements of float32 as piece 0, but it has 7 of float64"),
        (1, TensorPayload.of(torch.ones(7, dtype=torch.float64), [0, 9]), "as read at version 9; versions are 0 to 1"),
        (1, TensorPayload.of(torch.ones(7, dtype=torch.float64), [0, 0, {"lr": "no"}]), "lr = 'no' is not a hyperparameter"),
    ],
)
async def test_a_refusal_reaches_the_worker(step: int, payload: TensorPayload, reason: str) -> None:
    world = World(1, 1, 1, policy="async", split_bytes=1 << 20)
    replica = LinearReplica(SUBTRACT)

    async def worker() -> None:
        exchange = world.exchanges[0]
        await exchange.start(replica)
        await exchange_once(exchange, replica, 0)
        await world.endpoints["worker/0"].send("server/0", push_tag(0, step), payload)
        while replica.error is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(ProtocolError) as raised:
            await exchange.end_step()
        assert reason in str(raised.value)
        await exchange.stop()

    await world.run(worker())
    assert world.servers[0].updates == 4, "the first step, once"


async def test_a_lost_worker_ends_the_server_with_its_name() -> None:
    world = World(2, 1, 1, policy="sync")

    async def worker(rank: int) -> None:
        await world.exchanges[rank].start(LinearReplica(SUBTRACT))
        if rank == 0:
            world.endpoints["server/0"].forget("worker/1", "its process ended")

    with pytest.raises(ExceptionGroup) as raised:
        await world.run(worker(0), worker(1))
    assert raised.group_contains(PeerLostError, match="lost worker/1 while waiting for its gradients: its process ended")


async def test_a_lost_server_wakes_the_worker_with_its_name() -> None:
    world = World(2, 1, 2, policy="sync")
    replicas = [LinearReplica(SUBTRACT) for _ in range(2)]

    async def worker(rank: int) -> None:
        exchange = world.exchanges[rank]
        await exchange.start(replicas[rank])
        exchange.begin_step(0)
        if rank == 0:
            for bucket in replicas[rank].buckets:
                exchange.bucket_ready(bucket)
            await exchange.end_step()
            world.endpoints["worker/0"].forget("server/1", "its host is gone")
            with pytest.raises(PeerLostError, match=r"lost server/1 while waiting for .*: its host is gone"):
                await exchange.settle()
            assert isinstance(replicas[rank].error, PeerLostError)
        await exchange.stop()

    with pytest.raises(ExceptionGroup) as raised:
        await world.run(worker(0), worker(1))
    assert raised.group_contains(PeerLostError, match="server/1")


async def test_a_worker_that_stops_amid_a_step_frees_the_others() -> None:
    """A loss that is not a number: the worker pushes nothing, and says that it has finished."""
    world = World(2, 1, 2, policy="sync")
    replicas = [LinearReplica(SUBTRACT) for _ in range(2)]

    async def worker(rank: int) -> None:
        exchange = world.exchanges[rank]
        await exchange.start(replicas[rank])
        exchange.begin_step(0)
        if rank == 0:
            for bucket in replicas[rank].buckets:
                exchange.bucket_ready(bucket)
            await exchange.end_step()
            await exchange.settle()
        await exchange.stop()

    await world.run(worker(0), worker(1))


@pytest.mark.parametrize(("compression", "tolerance"), [("fp16", 1e-2), ("bf16", 1e-1), ("int8", 1e-1), ("topk", 1e-9)])
async def test_compressed_gradients(compression: str, tolerance: float) -> None:
    world = World(2, 1, 2, policy="sync", compression=compression, compression_ratio=1.0)
    replicas = [LinearReplica(SUBTRACT) for _ in range(2)]
    before = [parameter.clone() for parameter in replicas[0].parameters]

    async def worker(rank: int) -> None:
        await world.exchanges[rank].start(replicas[rank])
        for gradient in replicas[rank].gradients:
            gradient.copy_(torch.linspace(-1, 1, gradient.numel()) + rank)
        await exchange_once(world.exchanges[rank], replicas[rank], 0)
        await world.exchanges[rank].stop()

    await world.run(worker(0), worker(1))
    for was, now in zip(before, replicas[0].parameters, strict=True):
        want = was - (torch.linspace(-1, 1, was.numel()) + 0.5)
        assert torch.allclose(now, want, atol=tolerance)


class Flight:
    """A message on its way."""

    released = False

    async def wait_released(self) -> None:
        return None


def tensor_entry() -> TensorEntry:
    return TensorEntry(Piece(0, 0, 0, 4, 0, 0), "float32", 0, OptimizerSpec("torch.optim:SGD", ({"lr": 1.0},)))


def test_a_read_on_its_way_is_not_torn_by_an_update() -> None:
    entry = tensor_entry()
    loan = entry.lend()
    loan.sent = Flight()
    entry.update(torch.ones(4))
    assert torch.equal(loan.payload.tensor, torch.zeros(4))
    assert torch.equal(entry.values.detach(), -torch.ones(4))


def test_memory_is_kept_once_reads_have_arrived() -> None:
    entry = tensor_entry()
    address = entry.values.data_ptr()
    loan, other = entry.lend(), entry.lend()
    loan.sent = Flight()
    loan.sent.released = True
    other.give_back()
    entry.update(torch.ones(4))
    assert entry.values.data_ptr() == address


def test_sums_do_not_depend_on_arrival() -> None:
    gradients = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    orders = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]
    results = []
    for order in orders:
        total = GroupSum(range(4))
        for group in order:
            total.add(group, gradients[group])
        results.append(total.mean())
    assert results[0].tolist() == results[1].tolist() == results[2].tolist()
    assert [gradient.tolist() for gradient in gradients] == [[1e8], [1.0], [-1e8], [1.0]], "what came in is only read"
