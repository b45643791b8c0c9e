"""How runs end where the network is slow: nobody who has done its part takes with it what others still need."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from zmqtrain import Task
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Ladder


def test_the_last_parameters_arrive_however_long_they_take() -> None:
    """Without an evaluation, the last thing is a broadcast down a tree: who stands at its top is done long before its leaves, and
    what it has sent is on its way for longer than an endpoint drains."""
    models: list[nn.Module] = []

    def model() -> nn.Module:
        models.append(nn.Linear(250, 250))
        return models[-1]

    data = TensorDataset(torch.randn(8, 250), torch.zeros(8, 250))
    task = Task(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=data,
    )
    topology = Topology.from_dict(
        {
            "job": {"task": "given:task", "steps": 1, "timeout": "20 s"},
            "hosts": [{"name": "h[1-8]", "slots": 1}],
            "compute": {"groups": 8, "batch_size": 1},
            "exchange": {"kind": "allreduce"},
            "network": {"bandwidth": "950 kbit/s", "latency": "100 us"},
        }
    )
    seconds = 4 * 250 * 251 * 8 / 950e3
    assert seconds > Ladder.of(20.0).drain_s
    result = simulate(topology, options=Options(task=task))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    first, *others = models
    for other in others:
        for mine, its in zip(first.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, its)
