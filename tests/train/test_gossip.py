"""Whole runs of gossip on several hosts, beside as many models in one process that are mixed by the same schedule."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.train.world import run, topology_of
from zmqtrain.data.partition import Partition
from zmqtrain.exchange.gossip.schedule import Schedule
from zmqtrain.topology.bucket_limit import BucketLimit
from zmqtrain.train.random_state import seed_everything
from zmqtrain.train.task import Task

STEPS, BATCH, SEED = 4, 6, 1
#: Elements of a layer, so that a model is divided into several buckets of the least size.
WIDE = 160


def data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(5)
    inputs = torch.randn(61, 8, generator=drawn, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(5, (61,), generator=drawn))


def task() -> Task:
    def model() -> nn.Module:
        layers = [nn.Linear(8, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 5)]
        return nn.Sequential(*layers).double()

    return Task(
        model=model,
        loss=functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01),
        train_data=data(),
    )


def in_one_process(groups: int, *, gradients: bool) -> dict[str, Tensor]:
    """The mean of the models."""
    seed_everything(SEED)
    first, inputs, targets = task().model(), *data().tensors
    models = [first, *(copy.deepcopy(first) for _ in range(groups - 1))]
    optimizers = [task().optimizer(model.parameters()) for model in models]
    partition, schedule = Partition(len(inputs), groups, 1, BATCH, SEED), Schedule(groups, SEED)
    for step in range(STEPS):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            rows = torch.from_numpy(partition.indices(step, group, 0).copy())
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        if gradients:
            mix([[p.grad for p in model.parameters() if p.grad is not None] for model in models], schedule, step)
        for optimizer in optimizers:
            optimizer.step()
        if not gradients:
            mix([[p.detach() for p in model.parameters()] for model in models], schedule, step)
    states = [model.state_dict() for model in models]
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def mix(values: list[list[Tensor]], schedule: Schedule, step: int) -> None:
    before = [[tensor.clone() for tensor in tensors] for tensors in values]
    for rank, tensors in enumerate(values):
        partners = schedule.partners(step, rank)
        assert partners is not None
        for tensor, own, other in zip(tensors, before[rank], before[partners.sources[0]], strict=True):
            tensor.copy_((own + other) / 2)


@pytest.mark.parametrize(
    ("groups", "group_size", "gossip"),
    [(4, 1, {}), (3, 2, {}), (3, 1, {"exchange": "gradients"}), (2, 2, {"granularity": "batch"})],
)
async def test_a_small_model_in_several_buckets(groups: int, group_size: int, gossip: dict[str, Any], tmp_path: Path) -> None:
    """They are exchanged in turn; the result is that of one process to summation order, in float64."""
    hosts = [{"name": f"h{n}", "address": f"10.0.0.{n + 1}", "slots": group_size} for n in range(groups)]
    compute = {"groups": groups, "group_size": group_size, "batch_size": BATCH, "bucket_size": None}
    topology = topology_of(
        job={"seed": SEED, "steps": STEPS}, hosts=hosts, compute=compute, exchange={"kind": "gossip", "gossip": gossip}
    )
    assert BucketLimit.of(topology).divides(sum(p.numel() * 8 for p in task().model().parameters()))
    result = await run(topology, lambda _: task(), folder=tmp_path)
    assert not result.errors
    starts = [event for recorder in result.recorders.values() for event in recorder.of("start")]
    assert min(event["buckets"] for event in starts) > 2
    trained = load_file(tmp_path / "model.safetensors")
    for name, expected in in_one_process(groups, gradients="exchange" in gossip).items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-11, atol=1e-12)
