"""How runs end where the network is slow: nobody who has done its part takes with it what others still need."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.simulate.worlds import profile_file, topology_of
from zmqtrain import Task
from zmqtrain.run.faults import slow
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Timeouts


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
    assert seconds > Timeouts.of(20.0).flush_s
    result = simulate(topology, options=Options(task=task))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    first, *others = models
    for other in others:
        for mine, its in zip(first.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, its)


def test_groups_that_have_trained_wait_for_slower_ones_as_long_as_these_get_on(tmp_path: Path) -> None:
    """Asynchronous groups, one of which needs many times the longest time-out for its last steps."""
    topology = topology_of(profile_file(tmp_path), job={"timeout": "0.5 s", "steps": 40})
    longest_s = Timeouts.of(0.5).barrier_s
    result = simulate(topology, options=Options(faults=(slow("h4", 40.0, at=0.0),)))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    assert result.seconds > 3 * longest_s
