"""Servers keep their part of a checkpoint, and a run goes on from it with the same bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.server.world import LinearReplica, World, train
from zmqtrain.errors import CheckpointError

pytestmark = pytest.mark.virtual_time

ADAM = partial(torch.optim.Adam, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


class Kept:
    """Checkpoints in memory."""

    def __init__(self) -> None:
        self.parts: dict[int, tuple] = {}
        self.restore_from = 0

    async def save(self, step, tensors, sidecar) -> None:
        self.parts[step] = (tensors, sidecar)

    async def restore(self):
        return self.parts[self.restore_from]


@pytest.mark.parametrize("optimizer", [ADAM, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize(
    "settings", [{}, {"clip_norm": 0.5}, {"compression": "topk", "compression_ratio": 0.3}], ids=["plain", "clipped", "topk"]
)
async def test_a_resumed_run_has_the_same_bits(optimizer, settings) -> None:
    kept = [Kept(), Kept()]

    states: dict[int, list] = {}

    async def worker(world: World, rank: int, steps: int, first: int) -> list[torch.Tensor]:
        exchange, replica = world.exchanges[rank], LinearReplica(optimizer, seed=first)
        if first:
            exchange.load_state_dict(states[first][rank])
        result = await train(exchange, replica, steps, 48, first=first, keep_every=2)
        states.setdefault(steps, [{}] * 4)[rank] = exchange.state_dict()
        return result

    async def run(steps: int, first: int = 0) -> list[torch.Tensor]:
        world = World(2, 2, 2, policy="sync", checkpoints=kept, **settings)
        return (await world.run(*(worker(world, rank, steps, first) for rank in range(4))))[0]

    await run(2)
    await run(4)
    whole = await run(5)
    assert all(set(store.parts) == {2, 4} for store in kept)
    for step in (2, 4):
        for store in kept:
            store.restore_from = step
        resumed = await run(5, first=step)
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


async def test_asynchronous_servers_keep_their_parts() -> None:
    kept = [Kept(), Kept()]
    world = World(2, 1, 2, policy="async", snapshot=True, checkpoints=kept)
    replicas = [LinearReplica(SGD) for _ in world.workers]
    await world.run(*(train(e, r, 4, 48, keep_every=2) for e, r in zip(world.exchanges, replicas, strict=True)))
    assert all(set(store.parts) == {2, 4} for store in kept)
    for step in (2, 4):
        assert len({version for store in kept for version in store.parts[step][1]["versions"].values()}) == 1


async def test_a_run_that_stops_early_keeps_what_there_is() -> None:
    kept = [Kept()]
    world = World(1, 1, 1, policy="sync", checkpoints=kept)

    async def worker() -> None:
        await world.exchanges[0].start(LinearReplica(SGD))
        await world.endpoints["worker/0"].request("server/0", "checkpoint", 7, timeout=5.0)
        await world.exchanges[0].stop()

    await world.run(worker())
    assert set(kept[0].parts) == {7}


async def test_a_checkpoint_of_another_cut_is_refused() -> None:
    kept = [Kept(), Kept()]
    world = World(1, 1, 2, policy="sync", checkpoints=kept)
    await world.run(train(world.exchanges[0], LinearReplica(SGD), 2, 48, keep_every=2))
    for store in kept:
        store.restore_from = 2
    other = World(1, 1, 2, policy="sync", checkpoints=kept, split_bytes=24)
    with pytest.raises(ExceptionGroup) as raised:
        await other.run(train(other.exchanges[0], LinearReplica(SGD), 4, 48, first=2))
    assert raised.group_contains(CheckpointError, match=r"for piece \d+, but here it is torch.float64")
