"""Learning rates with another number of workers: for a step only, so that schedules and checkpoints see the task's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zmqtrain.errors import TaskError
from zmqtrain.topology.schema import Topology
from zmqtrain.train.bucket_optimizers import BucketOptimizers
from zmqtrain.train.resized_rate import multiplied, require_rates


def groups() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    parameters = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    rates = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:], "lr": torch.tensor(0.25)}]
    return parameters, torch.optim.SGD(rates)


@pytest.mark.parametrize("buckets", [False, True])
def test_a_step_has_the_multiplied_rates_and_the_optimizer_its_own(buckets: bool) -> None:
    parameters, optimizer = groups()
    if buckets:
        parts = BucketOptimizers(optimizer, [[parameter] for parameter in parameters])
        for index in (0, 1):
            parts.prepare(index, 0.5)
        optimizer.param_groups[0]["lr"] = 100.0  # a schedule goes on before the step is made
        for index in (0, 1):
            parts.step(index)
        assert optimizer.param_groups[0]["lr"] == 100.0
    else:
        with multiplied(optimizer, 0.5):
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[1]["lr"] == 0.25
    assert [float(parameter.detach()[0]) for parameter in parameters] == [0.75, 0.875]


def test_they_are_put_back_after_an_error() -> None:
    _, optimizer = groups()
    with pytest.raises(ValueError, match="x"), multiplied(optimizer, 3.0):
        raise ValueError("x")
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_optimizer_without_rates_is_refused() -> None:
    _, optimizer = groups()
    require_rates(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    del optimizer.param_groups[2]["lr"]
    with pytest.raises(TaskError, match=r'SGD has none.*on_resize = "keep"'):
        require_rates(optimizer)


def test_the_factor_follows_the_setting() -> None:
    def factor(how: str) -> float:
        job = {"elastic": True, "on_resize": how, "oversubscribe": True}
        topology = Topology.model_validate({"job": job, "compute": {"group_size": 2}, "exchange": {"kind": "allreduce"}})
        return topology.job.resized_rate(0.25)

    assert [factor(how) for how in ("keep", "sqrt", "linear")] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("more", [{"job": {}}, {"exchange": {"kind": "gossip"}, "job": {"elastic": True}}])
def test_it_is_for_elastic_all_reduce(more: dict[str, dict[str, object]]) -> None:
    sections = {"exchange": {"kind": "allreduce"}, "compute": {"groups": 2}} | more
    sections["job"] = {"oversubscribe": True, "on_resize": "linear"} | sections["job"]
    with pytest.raises(ValueError, match="on_resize is for elastic all-reduce"):
        Topology.model_validate(sections)
