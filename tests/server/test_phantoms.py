"""Phantoms go the very ways of tensors: the same bytes to the same peers, and no memory anywhere."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.exchange.counted import CountedEndpoint
from tests.server.world import SIZES, LinearReplica, World, exchange_once
from zmqtrain.errors import ProtocolError
from zmqtrain.events import NullRecorder
from zmqtrain.exchange.base import Bucket, OptimizerSpec
from zmqtrain.exchange.pieces import Piece
from zmqtrain.exchange.server_messages import PushMeta, push_tag
from zmqtrain.net.endpoint import Tag
from zmqtrain.server.phantom_shard import PhantomEntry, PhantomSum
from zmqtrain.wire.compress import make_compressor
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload

pytestmark = pytest.mark.virtual_time

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


class PhantomReplica(LinearReplica):
    """The same model, of which there are only sizes."""

    def __init__(self, sizes: Sequence[int] = SIZES, dtype: str = "float64") -> None:
        super().__init__(SGD, sizes=(1,))
        self._buckets = tuple(
            Bucket(index, PhantomPayload(size, dtype), PhantomPayload(size, dtype), 0, (f"p{index}",))
            for index, size in enumerate(sizes)
        )
        self.ready = [asyncio.Event() for _ in sizes]


class AuditRecorder(NullRecorder):
    """Keeps what is stated for an auditor."""

    def __init__(self) -> None:
        self.stated: list[tuple[str, Mapping[str, Any]]] = []

    def audit(self, what: str, /, **values: object) -> None:
        self.stated.append((what, values))

    def of(self, what: str) -> list[Mapping[str, Any]]:
        return [values for name, values in self.stated if name == what]


async def steps(world: World, rank: int, replica: LinearReplica, count: int) -> None:
    exchange = world.exchanges[rank]
    await exchange.start(replica)
    for step in range(count):
        await exchange_once(exchange, replica, step)
    await exchange.stop()


Traffic = dict[str, dict[tuple[str, Tag], list[int]]]


class CountedWorld(World):
    def _open(self, name: str) -> Any:
        counted = self.endpoints[name] = CountedEndpoint(super()._open(name))
        return counted


async def traffic(make: type[LinearReplica] | Any, count: int, *shape: int, **settings: Any) -> tuple[Traffic, World]:
    """What each process of a world sends."""
    world = CountedWorld(*shape, **settings)
    replicas = [make() for _ in world.workers]
    await world.run(*(steps(world, rank, replica, count) for rank, replica in enumerate(replicas)))
    sizes = {peer: endpoint.sizes for peer, endpoint in world.endpoints.items()}  # type: ignore[attr-defined]
    for of_peer in sizes.values():  # the server that orders may be done before it has told the others who left
        for key in [key for key in of_peer if key[1] == ("order",)]:
            del of_peer[key]
    return sizes, world


def nbytes_sent(traffic: Traffic, peer: str) -> int:
    return sum(sum(sizes) for sizes in traffic[peer].values())


POLICIES: list[dict[str, Any]] = [
    {"policy": "sync"},
    {"policy": "async"},
    {"policy": "bound", "bound": 1},
    {"policy": "async", "snapshot": True},
    {"policy": "sync", "clip_norm": 0.5},
    {"policy": "async", "clip_norm": 0.5},
    {"policy": "sync", "overlap": False},
]


@pytest.mark.parametrize("settings", POLICIES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 2), (2, 3, 2)], ids=str)
async def test_phantoms_are_exchanged_as_tensors_are(settings: dict[str, Any], shape: tuple[int, int, int]) -> None:
    real, _ = await traffic(lambda: LinearReplica(SGD), 3, *shape, **settings)
    phantom, world = await traffic(PhantomReplica, 3, *shape, **settings)
    assert phantom == real
    pieces = sum(len(server.entries) for server in world.servers)
    times = 1 if settings["policy"] == "sync" else shape[0]
    assert sum(server.updates for server in world.servers) == 3 * times * pieces
    assert all(isinstance(entry, PhantomEntry) for server in world.servers for entry in server.entries.values())


def shaped(make: Any) -> Any:
    """A replica whose first and last buckets have matrices."""
    replica = make()
    shapes = (((50, 50), (500,)), ((7,),), ((1,),), ((683, 3),))
    replica._buckets = tuple(replace(bucket, shapes=of) for bucket, of in zip(replica._buckets, shapes, strict=True))
    return replica


@pytest.mark.parametrize("compression", ["fp16", "bf16", "int8", "sign", "topk", "powersgd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
async def test_compressed_phantoms_have_honest_sizes(compression: str, dtype: torch.dtype) -> None:
    sizes = (3000, 7, 1, 2049)
    settings = {"policy": "sync", "compression": compression, "compression_ratio": 0.1, "split_bytes": 9000}
    real, _ = await traffic(partial(shaped, partial(LinearReplica, SGD, sizes=sizes, dtype=dtype)), 2, 2, 1, 2, **settings)
    phantoms = partial(PhantomReplica, sizes, str(dtype).removeprefix("torch."))
    phantom, _ = await traffic(partial(shaped, phantoms), 2, 2, 1, 2, **settings)
    assert phantom == real
    plain, _ = await traffic(partial(PhantomReplica, sizes), 2, 2, 1, 2, policy="sync", split_bytes=9000)
    assert nbytes_sent(phantom, "worker/1") < nbytes_sent(plain, "worker/1")


async def test_nothing_is_allocated() -> None:
    tracemalloc.start()
    try:
        replica = partial(PhantomReplica, (10**7,) * 4, "float32")
        _, world = await traffic(replica, 2, 2, 2, 2, policy="sync", compression="fp16", split_bytes=10**7)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(entry.piece.numel for server in world.servers for entry in server.entries.values()) == 4 * 10**7
    assert peak < 10**7, "of 160 MB of parameters on five processes"


@pytest.mark.parametrize("codec", ["none", "fp16", "topk"])
@pytest.mark.parametrize("phantom", [True, False], ids=["phantom servers", "real servers"])
async def test_pushes_of_the_other_kind_are_refused(phantom: bool, codec: str) -> None:
    world = World(1, 1, 1, policy="async", split_bytes=1 << 20)
    replica = PhantomReplica() if phantom else LinearReplica(SGD)
    other: Payload = TensorPayload.of(torch.ones(7, dtype=torch.float64)) if phantom else PhantomPayload(7, "float64")
    other.meta = PushMeta(0, 0).to_value()
    message = make_compressor(codec).encode("0", other)
    reason = "values as piece 0, but this server holds only its size" if phantom else "only a size as piece 0"

    async def worker() -> None:
        exchange = world.exchanges[0]
        await exchange.start(replica)
        await world.endpoints["worker/0"].send("server/0", push_tag(0, 0), message)
        while replica.error is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(ProtocolError) as raised:
            await exchange.end_step()
        assert reason in str(raised.value)
        await exchange.stop()

    await world.run(worker())
    assert world.servers[0].updates == 0


@pytest.mark.parametrize("settings", POLICIES[:4], ids=str)
@pytest.mark.parametrize("phantom", [True, False], ids=["phantom", "real"])
async def test_servers_tell_the_auditor_of_each_gradient_once_and_what_it_had_read(settings: dict[str, Any], phantom: bool) -> None:
    groups, count = 3, 4
    names = [*(f"server/{index}" for index in range(2)), *(f"worker/{group}" for group in range(groups))]
    recorders = {name: AuditRecorder() for name in names}
    world = World(groups, 1, 2, recorders=recorders, **settings)
    replicas = [PhantomReplica() if phantom else LinearReplica(SGD) for _ in range(groups)]
    await world.run(*(steps(world, rank, replica, count) for rank, replica in enumerate(replicas)))
    reads: list[tuple[int, int, int]] = []
    versions: dict[int, int] = {}
    for index in range(2):
        for fact in recorders[f"server/{index}"].of("applied"):
            piece = fact["piece"]
            versions[piece] = versions.get(piece, 0) + 1
            assert fact["version"] == versions[piece], "versions rise by one"
            for group, step, version in fact["reads"]:
                assert version < fact["version"]
                reads.append((group, step, piece))
            assert fact["step"] == fact["reads"][0][1]
    pieces = list(versions)
    assert sorted(reads) == sorted(itertools.product(range(groups), range(count), pieces)), "each once, and none left out"
    for group in range(groups):
        facts = recorders[f"worker/{group}"]
        pushed = {(fact["piece"], fact["step"]): fact["version"] for fact in facts.of("pushed")}
        read = {(fact["piece"], fact["step"]): fact["version"] for fact in facts.of("read")}
        assert len(pushed) == len(read) == count * len(pieces)
        assert all(pushed[key] == version for key, version in read.items() if key in pushed), f"group {group}"


def phantom_entry() -> PhantomEntry:
    return PhantomEntry(Piece(3, 0, 10, 20, 0, 0), "float32", 0, OptimizerSpec("torch.optim:SGD", ({"lr": 0.1},)))


def test_a_phantom_piece_counts_versions() -> None:
    entry = phantom_entry()
    total = PhantomSum(range(2))
    for group in range(2):
        total.add(group, entry.gradient(PhantomPayload(10)))
    entry.update(total.mean(), {"lr": 0.2}, 0.5)
    assert entry.version == 1
    loan = entry.lend([1, 0])
    assert (loan.payload.numel, loan.payload.dtype, loan.payload.meta) == (10, "float32", [1, 0])
    assert entry.tensors() == {}
    entry.load({}, 9)
    assert entry.version == 9
    with pytest.raises(ProtocolError, match="momentum = 1 is not a hyperparameter"):
        entry.check_hyperparameters({"momentum": 1})
