"""Gradients that say which parameters nothing has reached, however they are added up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.collectives.world import endpoints, everywhere, group_of
from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.collectives.unreached import Cuts, Parts, fill_unreached
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.pieces import Piece
from zmqtrain.host.sums import sum_into
from zmqtrain.server.shard import GroupSum, TensorEntry
from zmqtrain.wire.compress import decompress, make_compressor
from zmqtrain.wire.tensor import TensorPayload

STARTS, NUMEL = (0, 5, 6, 9), 12
SPANS = [(0, 5), (5, 6), (6, 9), (9, 12)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


def gradients(dtype: torch.dtype, workers: int) -> list[torch.Tensor]:
    """Nobody reaches the first parameter and the third; of the others the last worker has -0.0, and something more of one."""
    parts = Parts(STARTS, NUMEL, dtype)
    found = []
    for worker in range(workers):
        flat = torch.zeros(NUMEL, dtype=dtype)
        fill_unreached(flat)
        unreached = [0, 1, 2, 3]
        if worker == workers - 1:
            flat[10] = -1.5
            unreached = [0, 2]
        parts.say_reached(flat, unreached)
        found.append(flat)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_sums_in_memory(dtype: torch.dtype, scale: float) -> None:
    total = torch.empty(NUMEL, dtype=dtype)
    sum_into([total], gradients(dtype, 3), scale=scale)
    assert Parts(STARTS, NUMEL, dtype).unreached(total) == [0, 2]


def test_parameters_without_elements() -> None:
    parts = Parts((0, 0, 2, 2, 4), 4, torch.float64)
    flat = fill_unreached(torch.empty(4, dtype=torch.float64))
    parts.say_reached(flat, but=(0, 3))  # the second and the last but one begin where those do
    assert parts.unreached(flat) == [0, 2, 3, 4]
    flat = fill_unreached(torch.empty(4, dtype=torch.float64))
    parts.say_reached(flat, but=(1, 3))
    assert parts.unreached(flat) == [0, 1, 2, 3, 4]


def test_sums_on_a_server() -> None:
    for order in ([0, 1, 2], [2, 0, 1]):
        total, found = GroupSum([0, 1, 2]), gradients(torch.float32, 3)
        for group in order:
            total.add(group, found[group])
        assert Parts(STARTS, NUMEL, torch.float32).unreached(total.mean()) == [0, 2]


@pytest.mark.parametrize("algorithm", ["ring", "halving", "doubling"])
async def test_sums_over_the_network(algorithm: Any) -> None:
    async with endpoints(4) as nodes:
        found = gradients(torch.float32, 4)

        async def add(group: Group) -> None:
            await all_reduce(group, TensorPayload.of(found[group.rank]), ("sum",), algorithm=algorithm)

        await everywhere(group_of(nodes), add)
        assert [Parts(STARTS, NUMEL, torch.float32).unreached(total) for total in found] == [[0, 2]] * 4


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_sums_that_were_compressed(compression: Any) -> None:
    flat = torch.full((NUMEL,), -1e-30)  # smaller than what fp16 has, but for one
    flat[10] = 1.0
    fill_unreached(flat[:5])
    parts = Parts(STARTS, NUMEL, torch.float32)
    parts.say_reached(flat, [0])
    payload = decompress(make_compressor(compression).encode("piece", TensorPayload.of(flat)))
    assert isinstance(payload, TensorPayload)
    found = parts.unreached(payload.tensor)
    assert 0 in found
    assert 3 not in found


def test_a_parameter_in_two_pieces() -> None:
    cuts = Cuts(STARTS, [0, 3, 6, 10], torch.float32)
    reached, unreached = torch.full((NUMEL,), -0.0), torch.full((NUMEL,), -0.0)
    Parts(STARTS, NUMEL, torch.float32).say_reached(reached)
    cuts.say_reached(reached)
    cuts.say_reached(unreached)
    for start, stop in [(0, 3), (3, 6), (6, 10), (10, 12)]:
        parts = Parts([0], stop - start, torch.float32)
        assert not parts.unreached(reached[start:stop])
        assert parts.unreached(unreached[start:stop]) == [0]


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_piece_goes_on_from_a_checkpoint_with_a_state_for_each_parameter(name: str) -> None:
    settings: dict[str, Any] = {"SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, "Adam": {"lr": 0.1, "weight_decay": 0.1}}[
        name
    ]
    spec = OptimizerSpec(f"torch.optim:{name}", (settings,))
    generator = torch.Generator().manual_seed(1)

    def entry() -> TensorEntry:
        return TensorEntry(Piece(0, 0, 0, NUMEL, 0, 0), "float64", 0, spec, starts=STARTS)

    steps = [torch.randn(NUMEL, generator=generator, dtype=torch.float64) for _ in range(8)]
    for number in (0, 2, 3, 6):
        start, stop = SPANS[1 + number % 2]
        fill_unreached(steps[number][start:stop])
    whole, resumed = entry(), entry()
    for number, flat in enumerate(steps):
        if number == 4:
            resumed.load(whole.tensors(), 4)
        whole.update(flat)
    for flat in steps[4:]:
        resumed.update(flat)
    assert torch.equal(resumed.values, whole.values)

    parameters = [torch.nn.Parameter(torch.zeros(stop - start, dtype=torch.float64)) for start, stop in SPANS]
    alone = getattr(torch.optim, name)(parameters, **settings)
    for flat in steps:
        for parameter, (start, stop) in zip(parameters, SPANS, strict=True):
            parameter.grad = flat[start:stop] if bool(flat[start:stop].any()) else None
        alone.step()
    assert torch.equal(torch.cat([parameter.detach() for parameter in parameters]), whole.values)
