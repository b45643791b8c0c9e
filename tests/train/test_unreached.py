"""What is said of parameters that a backward does not reach, where gradients are compressed so that nobody else can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.local_exchange import LocalExchange
from tests.train.world import topology_of
from zmqtrain.data.batch import Batch
from zmqtrain.events import NullRecorder
from zmqtrain.exchange.base import Optimize
from zmqtrain.train.device.cpu import CpuDevice
from zmqtrain.train.replica import ReplicaSettings, TorchReplica
from zmqtrain.train.step import StepSettings, TrainStep
from zmqtrain.train.unreached import what_blinds


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.second = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + (self.second(x) if x.shape[0] == 4 else 0)


class Told(NullRecorder):
    def __init__(self) -> None:
        self.warnings: list[tuple[int | None, str]] = []

    def event(self, kind: str, /, *, step: int | None = None, **values: Any) -> None:
        if kind == "warning":
            self.warnings.append((step, values["text"]))


SGD = torch.optim.SGD
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], bool]] = {
    "plain": (lambda parameters: SGD(parameters, lr=0.1), False),
    "decay": (lambda parameters: SGD(parameters, lr=0.1, weight_decay=1e-3), True),
    "momentum": (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9), True),
    "adam": (torch.optim.Adam, True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("rank", "blind"), [(0, "some reason"), (1, "some reason"), (0, "")])
async def test_a_parameter_that_the_first_step_does_not_reach_is_named_once(name: str, rank: int, blind: str) -> None:
    make, warned = OPTIMIZERS[name]
    model, device, told = Branches(), CpuDevice(), Told()
    exchange = LocalExchange(Optimize.APART)
    replica = TorchReplica(model, make(model.parameters()), device, ReplicaSettings(bucket_bytes=100))
    await exchange.start(replica)
    replica.connect(exchange.bucket_ready)
    # The second branch is taken in one of two micro-batches, which is enough.
    settings = StepSettings(rank=rank, group_batch=7, accumulate=2, blind=blind)
    step = TrainStep(replica, nn.functional.cross_entropy, device, settings, told)
    for number in range(3):
        exchange.begin_step(number)
        batch = Batch((torch.randn(7, 6),), torch.zeros(7, dtype=torch.int64), 7)
        await device.run(lambda number=number, batch=batch: step(number, batch))
        await exchange.end_step()
    await device.run(replica.take_all)
    await device.close(5)
    if not warned or rank or not blind:
        assert not told.warnings
        return
    ((first, text),) = told.warnings
    assert first == 0
    assert "gave no gradient to unused.bias, unused.weight" in text or "gave no gradient to unused.weight, unused.bias" in text
    assert "second" not in text
    assert "with some reason their gradient is zero" in text
    assert "requires_grad_(False)" in text


@pytest.mark.parametrize(
    ("grid", "exchange", "words"),
    [
        ("1x2", {"kind": "model_server"}, ""),
        ("2x1", {"kind": "allreduce"}, ""),
        ("2x1", {"kind": "model_server"}, ""),
        ("1x2", {"kind": "model_server", "compression": "int8"}, "this [exchange] compression"),
        ("1x2", {"kind": "model_server", "compression": "sign"}, "this [exchange] compression"),
        ("1x2", {"kind": "model_server", "compression": "powersgd"}, "this [exchange] compression"),
        ("1x2", {"kind": "model_server", "compression": "fp16"}, ""),
        ("1x2", {"kind": "allreduce", "compression": "fp16"}, "this [exchange] compression"),
    ],
)
def test_which_runs_warn(grid: str, exchange: dict[str, Any], words: str) -> None:
    assert what_blinds(topology_of(compute={"group_size": 2, "grid": grid}, exchange=exchange)) == words
