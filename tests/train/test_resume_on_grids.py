"""A run resumes on another grid, and with another number of workers, as if it had never stopped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_clipping_on_grids import network, whole
from tests.train.test_divided import data_of
from tests.train.world import Recipe, Run, run, topology_of

HALF, STEPS = 3, 4

EXCHANGES: dict[str, tuple[int, dict[str, Any]]] = {
    "allreduce": (2, {"kind": "allreduce"}),
    "sync": (2, {"kind": "model_server", "staleness": "sync", "shards": 3, "split_size": 2048}),
    "async": (1, {"kind": "model_server", "staleness": "async"}),
    "gossip": (2, {"kind": "gossip"}),
    "mean": (2, {"kind": "averaging", "every": 2}),
    "elastic": (2, {"kind": "averaging", "every": 2, "averaging": {"method": "elastic"}}),
    "outer": (2, {"kind": "averaging", "every": 2, "averaging": {"method": "outer"}}),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
}


async def trained(
    kind: str, grid: str, optimizer: str, steps: int, *, folder: Path | None = None, resume: Path | None = None, **more: Any
) -> tuple[Run, list[torch.Tensor]]:
    """The run, and the parameters of each group. A run with a ``folder`` keeps a checkpoint of its last step."""
    groups, exchange = EXCHANGES[kind]
    recipe = Recipe(model=network, train_data=data_of(72), eval_data=None, optimizer=OPTIMIZERS[optimizer])
    hosts = {"hosts": more.pop("hosts")} if "hosts" in more else {}
    topology = topology_of(
        job={"steps": steps, "elastic": "replicas" in more, "checkpoint_every": HALF if folder else 0},
        compute={"groups": groups, "group_size": math.prod(map(int, grid.split("x"))), "batch_size": 8, "grid": grid}
        | more.pop("compute", {}),
        exchange=exchange | more,
        **hosts,
    )
    result = await run(topology, recipe, folder=folder, resume=resume)
    return result, [] if result.errors else [whole(recipe, group, grid) for group in range(groups)]


#: What a run is divided by before and after: a grid becomes another one, more or fewer workers, none, or a grid.
GRIDS = (("2x1", "1x2"), ("2x2", "2x1"), ("1x1", "2x2"), ("3x1", "1x1"), ("1x2", "3x1"))
#: Each exchange with both optimizers, and on two of the ways to another grid: a checkpoint's form depends on the exchange, and how
#: it is divided anew on the grids.
CASES = [
    (kind, *GRIDS[(2 * number + turn) % 5], ("sgd", "adam")[(number + turn) % 2])
    for number, kind in enumerate(EXCHANGES)
    for turn in range(2)
]


@pytest.mark.parametrize(("kind", "first", "second", "optimizer"), CASES)
async def test_a_run_goes_on_on_another_grid(kind: str, first: str, second: str, optimizer: str, tmp_path: Path) -> None:
    straight, expected = await trained(kind, "1x1", optimizer, STEPS)
    assert not straight.errors, straight.errors
    half, _ = await trained(kind, first, optimizer, HALF, folder=tmp_path)
    assert not half.errors, half.errors
    rest, found = await trained(kind, second, optimizer, STEPS, resume=tmp_path)
    assert not rest.errors, rest.errors
    assert rest.recorders["worker/0"].of("start")[0]["step"] == HALF
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)  # sums in another order


@pytest.mark.parametrize(("kind", "grid"), [("allreduce", "2x1"), ("sync", "1x2"), ("async", "2x2"), ("outer", "2x1")])
async def test_on_the_same_grid_it_has_the_same_bits(kind: str, grid: str, tmp_path: Path) -> None:
    _, expected = await trained(kind, grid, "adam", STEPS)
    await trained(kind, grid, "adam", HALF, folder=tmp_path)
    rest, found = await trained(kind, grid, "adam", STEPS, resume=tmp_path)
    assert not rest.errors, rest.errors
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


async def test_other_buckets_and_pieces_go_on_too(tmp_path: Path) -> None:
    """Model servers with one group of two workers, whose buckets are larger later."""
    _, expected = await trained("sync", "2x1", "adam", STEPS)
    await trained("sync", "2x1", "adam", HALF, folder=tmp_path, compute={"bucket_size": 64})
    rest, found = await trained("sync", "2x1", "adam", STEPS, resume=tmp_path, compute={"bucket_size": 4096}, split_size=1000)
    assert not rest.errors, rest.errors
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "shards", "split_size", "more"),
    [
        ("sync", 1, 4096, {}),
        ("sync", 5, 512, {"replicas": 1}),
        ("async", 3, 4096, {"compression": "int8"}),
    ],
)
async def test_other_numbers_of_servers_and_sizes_of_pieces_go_on_too(
    kind: str, shards: int, split_size: int, more: dict[str, Any], tmp_path: Path
) -> None:
    """The buckets stay what they are. Of int8, which has one scale a piece, only the first step is compared."""
    grid = "1x2"
    if "replicas" in more:  # which are for groups of one worker
        more, grid = {**more, "hosts": [{"name": f"h{number}", "slots": 4} for number in range(2)]}, "1x1"
    straight, expected = await trained(kind, grid, "adam", STEPS, **more)
    assert not straight.errors, straight.errors
    half, _ = await trained(kind, grid, "adam", HALF, folder=tmp_path, **more)
    assert not half.errors, half.errors
    changed: dict[str, Any] = {"shards": shards, "split_size": split_size}
    rest, found = await trained(kind, grid, "adam", STEPS, resume=tmp_path, **(more | changed))
    assert not rest.errors, rest.errors
    assert rest.recorders["worker/0"].of("start")[0]["step"] == HALF
    if "compression" not in more:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("compression", ["sign", "powersgd"])
async def test_what_all_reduce_has_not_sent_is_not_divided_anew(compression: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"compression": compression} | ({"compression_rank": 1} if compression == "powersgd" else {})
    _, expected = await trained("allreduce", "1x2", "adam", STEPS, **more)
    half, _ = await trained("allreduce", "1x2", "adam", HALF, folder=tmp_path, **more)
    assert not half.errors, half.errors
    rest, found = await trained("allreduce", "1x2", "adam", STEPS, resume=tmp_path, **more)
    assert not rest.errors, rest.errors
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for changed in ({"compute": {"bucket_size": 64}}, {"compression": "none", "compression_rank": 4}):
        rest, _ = await trained("allreduce", "1x2", "adam", STEPS, resume=tmp_path, **more | changed)
        assert any("compression" in str(error) for error in rest.errors.values()), rest.errors


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("allreduce", {"every": 2}, "each worker has added up its own"),
        ("async", {"compression": "topk", "compression_ratio": 0.3}, "compression has not sent"),
        ("async", {"compression": "powersgd", "compression_rank": 1}, "compression has not sent"),
        ("outer", {"averaging": {"method": "outer", "deltas": "int8"}}, "what rounding has lost"),
    ],
)
async def test_what_belongs_to_a_worker_is_not_divided_anew(kind: str, more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    half, _ = await trained(kind, "2x1", "sgd", HALF, folder=tmp_path, **more)
    assert not half.errors, half.errors
    rest, _ = await trained(kind, "1x2", "sgd", STEPS, resume=tmp_path, **more)
    assert any(reason in str(error) for error in rest.errors.values()), rest.errors
