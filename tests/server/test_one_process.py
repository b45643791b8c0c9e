"""A synchronous step on groups and servers equals one process on the whole batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.pairwise import pairwise
from tests.precision import close
from tests.server.world import LinearReplica, World, one_process, train

pytestmark = pytest.mark.virtual_time

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAM = partial(torch.optim.Adam, lr=0.01)
OTHERS = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
}
SAMPLES = 48
#: All of these in pairs, with both optimizers.
WORLDS = {"groups": (1, 2, 3, 4), "size": (1, 2, 3, 4), "servers": (1, 2, 3), "optimizer": {"sgd": SGD, "adam": ADAM}}


async def compare(world: World, optimizer, *, dtype=torch.float64, steps=3, decay=1.0, clip_norm=0.0, replicas=None) -> None:
    replicas = replicas or [LinearReplica(optimizer, dtype=dtype, seed=int(rank > 0)) for rank in range(len(world.workers))]
    results = await world.run(
        *(
            train(exchange, replica, steps, SAMPLES, decay=decay)
            for exchange, replica in zip(world.exchanges, replicas, strict=True)
        )
    )
    plain = partial(one_process, optimizer, steps, SAMPLES, given=dtype, decay=decay, clip_norm=clip_norm)
    expected, exact = plain(dtype=dtype), plain(dtype=torch.float64)
    for parameters in results:
        for bucket, (got, want, judge) in enumerate(zip(parameters, expected, exact, strict=True)):
            close(got, want, f"bucket {bucket}", exact=judge)
    for parameters in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0], strict=True))
    applied = len(world.settings.groups) * sum(server.updates for server in world.servers)
    assert sum(server.staleness.get(0, 0) for server in world.servers) == applied, "nothing is stale in step"


@pairwise(WORLDS)
async def test_equals_one_process(groups: int, size: int, servers: int, optimizer) -> None:
    await compare(World(groups, size, servers, policy="sync"), optimizer)


@pairwise(WORLDS)
async def test_in_single_precision(groups: int, size: int, servers: int, optimizer) -> None:
    await compare(World(groups, size, servers, policy="sync"), optimizer, dtype=torch.float32)


@pytest.mark.parametrize("optimizer", OTHERS.values(), ids=OTHERS.keys())
async def test_other_optimizers(optimizer) -> None:
    await compare(World(2, 2, 2, policy="sync"), optimizer)


@pytest.mark.parametrize("changes", [{"overlap": False}, {"snapshot": True}, {"split_bytes": 1 << 20}, {"split_bytes": 8}])
async def test_other_settings(changes) -> None:
    await compare(World(2, 2, 3, policy="sync", **changes), SGD)


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
async def test_schedules_reach_the_servers(optimizer) -> None:
    await compare(World(2, 2, 2, policy="sync"), optimizer, decay=0.5, steps=4)


@pytest.mark.parametrize("clip_norm", [0.5, 1e9])
@pytest.mark.parametrize(("groups", "size", "servers"), [(1, 1, 1), (2, 2, 1), (3, 2, 3), (2, 1, 5)])
async def test_clipping_by_the_norm_over_all_servers(groups: int, size: int, servers: int, clip_norm: float) -> None:
    await compare(World(groups, size, servers, policy="sync", clip_norm=clip_norm), SGD, clip_norm=clip_norm)


@pytest.mark.parametrize("policy", ["async", "bound"])
@pytest.mark.parametrize("size", [1, 3])
async def test_one_asynchronous_group_clips_itself(policy: str, size: int) -> None:
    await compare(World(1, size, 2, policy=policy, bound=1, clip_norm=0.5), SGD, clip_norm=0.5)


async def test_parameter_groups_keep_their_hyperparameters() -> None:
    def optimizer(parameters):
        return torch.optim.SGD([{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "momentum": 0.9}], lr=0.002)

    world = World(2, 2, 2, policy="sync")
    replicas = [LinearReplica(optimizer, groups=(0, 0, 1, 1)) for _ in world.workers]
    await compare(world, optimizer, replicas=replicas, decay=0.9)


async def test_servers_may_come_late() -> None:
    world = World(2, 1, 2, policy="sync")
    replicas = [LinearReplica(SGD) for _ in world.workers]
    await world.run(*(train(e, r, 2, SAMPLES) for e, r in zip(world.exchanges, replicas, strict=True)), server_delay_s=0.05)
    assert all(torch.equal(a, b) for a, b in zip(replicas[0].parameters, replicas[1].parameters, strict=True))
