"""On a grid of one row each worker has the whole model, and a group divides its batch over the columns. Such a group loses workers,
and gets them back, as one without a grid does, which is compared with one process elsewhere: the two are the same, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.simulate.test_elastic_averages import Recipe
from zmqtrain.run.faults import Fault, kill
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.schema import Topology

STEPS, GROUPS, SIZE = 6, 2, 3
EXCHANGES: dict[str, dict[str, Any]] = {
    "allreduce": {"kind": "allreduce"},
    "sync": {"kind": "model_server", "staleness": "sync", "shards": 2},
    "bounded": {"kind": "model_server", "staleness": {"bound": 1}, "shards": 2},
    "async": {"kind": "model_server", "staleness": "async", "shards": 2},
    "averaging": {"kind": "averaging", "every": 3},
    "outer": {"kind": "averaging", "every": 3, "averaging": {"method": "outer"}},
    "gossip": {"kind": "gossip"},
}


def trained(exchange: str, *faults: Fault, **compute: Any) -> tuple[list[Mapping[str, Tensor]], float]:
    """The model of each process that there was, as it has left it, and how long the run took."""
    recipe = Recipe()
    models: list[nn.Module] = recipe.models
    document: dict[str, Any] = {
        "job": {"task": "given:task", "steps": STEPS, "timeout": "5 s", "elastic": True, "restarts": 1, "eval_every": 3},
        "hosts": [{"name": "h[1-6]", "slots": 1}],
        "compute": {"groups": GROUPS, "group_size": SIZE, "batch_size": 15, "bucket_size": "1 KiB", **compute},
        "exchange": EXCHANGES[exchange],
        "network": {"bandwidth": "1 Gbit/s", "latency": "1 ms"},
        "data": {"shuffle": "global"},
        "simulation": {"payload": "real"},
    }
    result = simulate(Topology.from_dict(document), options=Options(faults=faults, task=recipe.task()))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    return [model.state_dict() for model in models], result.seconds


@pytest.mark.parametrize("exchange", list(EXCHANGES))
def test_a_grid_of_one_row_is_a_group_also_when_workers_are_lost_and_come_back(exchange: str) -> None:
    faults = kill("worker/1", step=2), kill("worker/3", step=3)
    grid, grid_s = trained(exchange, *faults, grid="1x3")
    plain, plain_s = trained(exchange, *faults)
    assert len(grid) == len(plain) == GROUPS * SIZE + 2, "both that came back have built models, too"
    assert grid_s == plain_s
    for mine, its in zip(grid, plain, strict=True):
        assert all(torch.equal(tensor, its[name]) for name, tensor in mine.items())
