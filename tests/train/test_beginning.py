"""What the exchange does not send is that of the first worker, even if each worker has built another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.world import Recipe, run, topology_of

EXCHANGES: list[dict[str, Any]] = [
    {"kind": "allreduce"},
    {"kind": "model_server", "staleness": "sync"},
    {"kind": "model_server", "staleness": "async"},
    {"kind": "gossip"},
]


class Random(nn.Module):
    """Projects by a random buffer, a frozen parameter and one that the optimizer does not get: others in each object."""

    def __init__(self) -> None:
        super().__init__()
        unseeded = torch.Generator()
        unseeded.seed()
        self.layer, self.left_out = nn.Linear(6, 3), nn.Parameter(torch.randn(6, generator=unseeded))
        self.frozen = nn.Parameter(torch.randn(6, 6, generator=unseeded), requires_grad=False)
        self.register_buffer("buffer", torch.randn(6, 6, generator=unseeded), persistent=False)
        self.register_buffer("empty", torch.zeros(0))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layer(torch.cos(inputs @ self.buffer) @ self.frozen * self.left_out)
        return result

    def others(self) -> list[Tensor]:
        return [each.detach().clone() for each in (self.buffer, self.frozen, self.left_out)]


def recipe() -> Recipe:
    return Recipe(model=Random, optimizer=lambda parameters: torch.optim.SGD(parameters[1:], lr=0.1))


@pytest.mark.parametrize("exchange", EXCHANGES)
async def test_workers_begin_with_the_first_one_s_buffers_and_untrained_parameters(exchange: dict[str, Any]) -> None:
    made = recipe()
    shape = {"groups": 2, "group_size": 2, "batch_size": 8}
    result = await run(topology_of(job={"steps": 2}, compute=shape, exchange=exchange), made)
    assert not result.errors
    first, *others = (model.others() for model in made.models.values())  # type: ignore[operator]
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("exchange", EXCHANGES)
async def test_a_resumed_run_has_the_frozen_parameters_of_the_checkpoint(exchange: dict[str, Any], tmp_path: Path) -> None:
    before, after = recipe(), recipe()
    compute = {"groups": 2, "group_size": 1, "batch_size": 8}
    first = await run(topology_of(job={"steps": 2}, compute=compute, exchange=exchange), before, folder=tmp_path / "first")
    checkpoint = tmp_path / "first" / "step-00000002"
    second = await run(
        topology_of(job={"steps": 4}, compute=compute, exchange=exchange), after, folder=tmp_path / "second", resume=checkpoint
    )
    assert not first.errors
    assert not second.errors
    for peer in ("worker/0", "worker/1"):
        (_, frozen, left_out), (_, was_frozen, was_left_out) = after.models[peer].others(), before.models[peer].others()  # type: ignore[operator]
        assert torch.equal(frozen, was_frozen)
        assert torch.equal(left_out, was_left_out)


async def test_buffers_can_still_be_resized() -> None:
    """As observers for quantization resize theirs, when they see the first batch."""

    class Observing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3).double()
            self.register_buffer("scale", torch.ones(1))

        def forward(self, inputs: Tensor) -> Tensor:
            self.scale.resize_(3).fill_(1.0)  # type: ignore[operator]
            result: Tensor = self.layer(inputs)
            return result

    shape = {"groups": 1, "group_size": 2, "batch_size": 8}
    result = await run(topology_of(job={"steps": 2}, compute=shape), Recipe(model=Observing))
    assert not result.errors
