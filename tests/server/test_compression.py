"""Synchronous servers with compressed gradients against the papers' algorithms in one process, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.exchange.compression import Powers, largest, signs
from tests.server.world import LinearReplica, World, data, exchange_once, train
from zmqtrain.errors import CheckpointError, UsageError
from zmqtrain.exchange.matrices import matrices_in
from zmqtrain.exchange.pieces import Piece
from zmqtrain.wire.compress.factors import Layout

pytestmark = pytest.mark.virtual_time

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
SAMPLES, STEPS = 48, 5
#: One bucket of two matrices and a vector, and one of a vector.
SHAPES = (((12, 10), (5,), (6, 2, 4)), ((40,),))
SIZES = (173, 40)


class Shaped(LinearReplica):
    """The parameters of a bucket are those of ``SHAPES``."""

    def __init__(self, optimizer: Any, seed: int = 0) -> None:
        super().__init__(optimizer, sizes=SIZES, seed=seed)
        self._buckets = tuple(replace(bucket, shapes=shapes) for bucket, shapes in zip(self._buckets, SHAPES, strict=True))


async def one_process(pieces: list[Piece], groups: int, compression: str) -> list[torch.Tensor]:
    """Each group's gradient is compressed piece by piece, and the optimizer takes the mean."""
    replica = Shaped(SGD)
    lost = [[torch.zeros(size, dtype=torch.float64) for size in SIZES] for _ in range(groups)]
    layouts = {p.index: Layout.of(p.numel, 2, matrices_in(SHAPES[p.bucket], p.start, p.stop)) for p in pieces}
    powers: dict[tuple[int, int], list[Powers]] = {}
    for group in range(groups):
        for index, layout in layouts.items():
            first = layout.first_rights(str(index), torch.zeros(1, dtype=torch.float64))
            powers[group, index] = [Powers(right.clone()) for right in layout.rights(first)]
    for step in range(STEPS):
        features, target = data(step, SAMPLES, SIZES)
        means = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        for group in range(groups):
            own = slice(group, SAMPLES, groups)
            replica.backward([x[own] for x in features], target[own], SAMPLES // groups)
            for piece in pieces:
                span = slice(piece.start, piece.stop)
                whole = replica.gradients[piece.bucket][span] + lost[group][piece.bucket][span]
                sent = whole.clone()
                if compression == "sign":
                    sent = signs(whole)
                elif compression == "topk":
                    sent = largest(whole, 0.1)
                else:
                    for matrix, power in zip(layouts[piece.index].matrices, powers[group, piece.index], strict=True):
                        matrix.of(sent).copy_(power.of([matrix.of(whole)])[0])
                lost[group][piece.bucket][span] = whole - sent
                means[piece.bucket][span] += sent / groups
        for parameter, mean in zip(replica.parameters, means, strict=True):
            parameter.grad = mean
        replica.optimizer.step()
    return replica.parameters


@pytest.mark.parametrize("split_bytes", [1 << 20, 400])
@pytest.mark.parametrize("compression", ["sign", "topk", "powersgd"])
async def test_equals_the_papers_algorithm_in_one_process(compression: str, split_bytes: int) -> None:
    groups = 2
    world = World(
        groups, 1, 2, policy="sync", split_bytes=split_bytes, compression=compression, compression_ratio=0.1, compression_rank=2
    )
    replicas = [Shaped(SGD, seed=rank) for rank in range(groups)]

    async def worker(rank: int) -> None:
        exchange, replica = world.exchanges[rank], replicas[rank]
        await exchange.start(replica)
        for step in range(STEPS):
            features, target = data(step, SAMPLES, SIZES)
            own = slice(rank, SAMPLES, groups)
            replica.backward([x[own] for x in features], target[own], SAMPLES // groups)
            await exchange_once(exchange, replica, step)
        await exchange.stop()

    await world.run(*(worker(rank) for rank in range(groups)))
    pieces = [entry.piece for server in world.servers for entry in server.entries.values()]
    expected = await one_process(pieces, groups, compression)
    for parameters in (replica.parameters for replica in replicas):
        for got, want in zip(parameters, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("compression", ["sign", "powersgd"])
async def test_groups_of_several_workers_compress_their_sum(compression: str) -> None:
    """Each worker's part of the group's gradient is a stream of its own. All end alike, and near what is not compressed."""
    world = World(2, 2, 2, policy="sync", split_bytes=1 << 20, compression=compression, compression_rank=2)
    replicas = [Shaped(SGD, seed=rank) for rank in range(4)]
    before = [parameter.clone() for parameter in replicas[0].parameters]

    async def worker(rank: int) -> list[torch.Tensor]:
        exchange, replica = world.exchanges[rank], replicas[rank]
        await exchange.start(replica)
        for step in range(STEPS):
            features, target = data(step, SAMPLES, SIZES)
            own = slice(rank, SAMPLES, 4)
            replica.backward([x[own] for x in features], target[own], SAMPLES // 2)
            await exchange_once(exchange, replica, step)
        await exchange.stop()
        return replica.parameters

    results = await world.run(*(worker(rank) for rank in range(4)))
    for parameters in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(parameters, results[0], strict=True))
    assert any(not torch.equal(was, now) for was, now in zip(before, results[0], strict=True))


async def test_shapes_that_nobody_knows_are_refused() -> None:
    world = World(1, 1, 1, policy="sync", compression="powersgd")
    with pytest.raises(ExceptionGroup) as raised:
        await world.run(train(world.exchanges[0], LinearReplica(SGD), 1, SAMPLES))
    assert raised.group_contains(UsageError, match="a profile has only the sizes of layers")


async def test_what_was_kept_with_another_rank_is_refused() -> None:
    async def kept(rank: int, state: Any = None) -> Any:
        world = World(1, 1, 1, policy="sync", compression="powersgd", compression_rank=rank, split_bytes=1 << 20)
        exchange, replica = world.exchanges[0], Shaped(SGD)
        exchange.load_state_dict(state or {})

        async def worker() -> None:
            await exchange.start(replica)
            replica.backward(*data(0, SAMPLES, SIZES), SAMPLES)
            await exchange_once(exchange, replica, 0)
            await exchange.stop()

        await world.run(worker())
        return exchange.state_dict()

    state = await kept(2)
    assert set(state["residuals"]) == {"0", "0/q"}, "the second bucket has no matrix"
    await kept(2, state)
    with pytest.raises(ExceptionGroup) as raised:
        await kept(3, state)
    assert raised.group_contains(CheckpointError, match="another division")
