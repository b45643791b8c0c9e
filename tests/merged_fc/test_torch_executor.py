"""The merged layers in torch: a turn that does not count gives the gradients of the activations, and leaves all else as it was."""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from zmqtrain import Task
from zmqtrain.merged_fc.executor import BatchPart
from zmqtrain.merged_fc.layers import FcLayers
from zmqtrain.merged_fc.messages import ActivationsMeta
from zmqtrain.merged_fc.phases import build_phase
from zmqtrain.merged_fc.queue import Applied, Turn
from zmqtrain.merged_fc.torch_executor import ExecutorSettings, TorchExecutor
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.cpu import CpuDevice
from zmqtrain.train.structure import take_apart
from zmqtrain.wire.tensor import TensorPayload

BATCH = 6


class Layers:
    """An executor of two groups in step, and what it is given."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(2 * BATCH, 12, dtype=torch.float64, generator=generator)
        self.y = torch.randint(3, (2 * BATCH,), generator=generator)
        topology = Topology.from_dict({"job": {}, "exchange": {"kind": "model_server", "merged_fc": True}})
        self.device = CpuDevice()
        phase, optimizer, _, facts = build_phase(self.task(), "fc", topology, self.device)
        self.model: nn.Module = phase
        settings = ExecutorSettings(groups=2, together=True)
        self.executor = TorchExecutor(self.task(), FcLayers.whole(phase, 2), optimizer, self.device, settings, facts)

    @staticmethod
    def task() -> Task:
        def model() -> nn.Module:
            torch.manual_seed(1)
            fc = nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)
            return nn.Sequential(nn.Conv2d(1, 3, 1), nn.Flatten(), *fc).double()

        def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.Adam(parameters, lr=0.1)

        data = TensorDataset(torch.zeros(9, 1, 2, 2, dtype=torch.float64), torch.zeros(9, dtype=torch.int64))
        return Task(model=model, loss=nn.functional.cross_entropy, optimizer=optimizer, train_data=data)

    async def train(self, group: int, *, counts: bool = True) -> Tensor:
        """The gradients of the group's activations."""
        rows = slice(group * BATCH, (group + 1) * BATCH)
        structure, targets = take_apart(self.y[rows])
        meta = ActivationsMeta(2, (True,), BATCH, divisor=float(BATCH), structure=structure)
        payloads = tuple(TensorPayload.of(each.clone()) for each in (self.x[rows], *targets))
        turn = Turn(group, 0, 0, (0,), last=True, counts=counts)
        trained = await self.executor.train(turn, [BatchPart(meta, payloads)])
        ((gradient,),) = trained.gradients
        assert isinstance(gradient, TensorPayload)
        return gradient.tensor.clone()

    async def step(self, *groups: int) -> dict[str, Tensor]:
        await self.executor.update(Applied(groups, (0,) * len(groups), (0,) * len(groups), ""))
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


async def test_a_turn_that_does_not_count_changes_nothing() -> None:
    plain, other = Layers(), Layers()
    own = [await plain.train(group) for group in (0, 1)]
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    idle = await other.train(0, counts=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.model.state_dict().items())
    assert torch.equal(idle, own[0])
    # Also while the group's gradients wait for those of others.
    await other.train(0)
    await other.train(0, counts=False)
    await other.train(1)
    expected, found = await plain.step(0, 1), await other.step(0, 1)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    await asyncio.gather(*(each.device.close(1.0) for each in (plain, other)))
