"""Compression that loses nothing must change nothing: with all elements (top-k) or full rank (PowerSGD), whatever the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.world import Recipe, Run, data_of, run, topology_of


class Tied(nn.Module):
    """A weight of two layers, a parameter without dimensions, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.second.bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


class Images(nn.Module):
    """Convolutions whose weights lie in memory with the channels last, and a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(48, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs.view(-1, 2, 3, 1).expand(-1, 2, 3, 2)
        return self.last(torch.tanh(self.norm(self.first(images))).flatten(1))


def decayed(parameters: Any) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    every = list(parameters)
    matrices, others = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


ALLREDUCE: dict[str, Any] = {"kind": "allreduce"}
SERVERS: dict[str, Any] = {"kind": "model_server", "staleness": "sync", "shards": 2}
LOSSLESS: list[dict[str, Any]] = [
    {"compression": "topk", "compression_ratio": 1.0},
    {"compression": "powersgd", "compression_rank": 64},
]
#: The runs without compression, which both are compared with.
PLAIN: dict[str, tuple[Recipe, Run]] = {}


@pytest.mark.parametrize("compression", LOSSLESS, ids=["topk", "powersgd"])
@pytest.mark.parametrize(
    ("model", "optimizer", "exchange", "other"),
    [
        (Tied, decayed, ALLREDUCE, {}),
        (Tied, decayed, SERVERS, {"optimizer": {"clip_norm": 0.3}}),
        (Images, sgd, ALLREDUCE, {"optimizer": {"clip_norm": 0.3}, "compute": {"batch_size": 7}}),
        (Images, sgd, SERVERS | {"split_size": 128}, {}),
        (Images, decayed, SERVERS | {"merged_fc": True}, {"compute": {"groups": 2, "group_size": 2, "batch_size": 8}}),
        (Images, sgd, SERVERS | {"replicas": 1}, {"compute": {"groups": 3, "group_size": 1, "batch_size": 4}}),
        (Tied, sgd, ALLREDUCE | {"every": 2}, {"compute": {"accumulate": 2}}),
    ],
)
async def test_it_is_the_run_without_compression(
    model: type[nn.Module], optimizer: Any, exchange: dict[str, Any], other: dict[str, Any], compression: dict[str, Any]
) -> None:
    """To summation order: top-k's mean is summed in another one."""

    async def trained(exchange: dict[str, Any]) -> tuple[Recipe, Run]:
        recipe = Recipe(model=lambda: model().double(), optimizer=optimizer, train_data=data_of())
        sections = {"compute": {"groups": 2, "group_size": 2, "batch_size": 8} | other.get("compute", {}), "job": {"steps": 6}}
        result = await run(topology_of(exchange=exchange, **{**other, **sections}), recipe)
        assert not result.errors
        return recipe, result

    case = repr((model, optimizer, exchange, other))
    if case not in PLAIN:
        PLAIN[case] = await trained(exchange)
    (expected, plain), (found, result) = PLAIN[case], await trained(exchange | compression)
    torch.testing.assert_close(result.losses("worker/0"), plain.losses("worker/0"), rtol=1e-11, atol=1e-12)
    assert len(set(plain.losses("worker/0"))) == 6
    for worker in found.models:
        state = found.models[worker].state_dict()
        torch.testing.assert_close(state, dict(expected.models[worker].state_dict()), rtol=1e-10, atol=1e-12, check_stride=False)


@pytest.mark.parametrize("compression", LOSSLESS, ids=["topk", "powersgd"])
@pytest.mark.parametrize("exchange", [ALLREDUCE, SERVERS])
async def test_gradients_that_are_not_finite_pass_over_the_same_steps(
    exchange: dict[str, Any], compression: dict[str, Any]
) -> None:
    """In float16, whose scale rises until it is too large: nothing of such a gradient may be kept for later steps."""

    def steep(output: Tensor, target: Tensor) -> Tensor:
        return 500.0 * nn.functional.cross_entropy(output.float(), target)

    seen = []
    for more in ({}, compression):
        recipe = Recipe(torch.float32, loss=steep, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=2e-4))
        compute = {"groups": 2, "group_size": 2, "batch_size": 8, "precision": "float16"}
        result = await run(topology_of(compute=compute, exchange=exchange | more, job={"steps": 20}), recipe)
        assert not result.errors
        scales = [(event["step"], event["scale"]) for event in result.recorders["worker/0"].of("loss scale")]
        assert scales
        seen.append((scales, recipe.parameters("worker/0")))
    assert seen[0][0] == seen[1][0]
    torch.testing.assert_close(seen[0][1], seen[1][1], rtol=1e-3, atol=1e-5)
