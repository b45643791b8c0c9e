"""What a forward itself writes: parameters are refused, buffers and modes are warned of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.world import Recipe, Run, run, topology_of
from zmqtrain.errors import TaskError

EXCHANGES: list[dict[str, Any]] = [{"kind": "allreduce"}, {"kind": "model_server", "staleness": "sync"}]


class Keeps(nn.Module):
    """Has a buffer, which its forward may change, and a parameter that the first forward may set."""

    def __init__(self, buffer: str = "", *, parameter: bool = False) -> None:
        super().__init__()
        self.buffer, self.first = buffer, parameter
        self.layer, self.shift = nn.Linear(6, 3), nn.Parameter(torch.zeros(6))
        self.register_buffer("kept", torch.zeros(6))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            if self.first:
                self.shift.copy_(-inputs.mean(0))
            if self.training and self.buffer:
                self.kept.lerp_(inputs.mean(0) if self.buffer == "samples" else self.layer.weight.mean(0), 0.5)
        self.first = False
        result: Tensor = self.layer(inputs + self.shift)
        return result


async def trained(model: Any, exchange: dict[str, Any] = EXCHANGES[0], **compute: Any) -> Run:
    shape = {"groups": 2, "group_size": 1, "batch_size": 8, **compute}
    return await run(topology_of(job={"steps": 4}, compute=shape, exchange=exchange), Recipe(model=model))


def warnings(result: Run) -> list[str]:
    assert not result.errors
    return [event["text"] for recorder in result.recorders.values() for event in recorder.of("warning")]


@pytest.mark.parametrize("exchange", EXCHANGES)
async def test_a_buffer_of_the_workers_own_samples_is_warned_of(exchange: dict[str, Any]) -> None:
    (text,) = warnings(await trained(lambda: Keeps("samples"), exchange))
    assert "different values of the buffer 'kept'" in text
    assert not warnings(await trained(lambda: Keeps("weights"), exchange))


async def test_asynchronous_groups_are_compared_within_each_group() -> None:
    servers = {"kind": "model_server", "staleness": "async"}
    assert not warnings(await trained(lambda: Keeps("samples"), servers))
    assert warnings(await trained(lambda: Keeps("samples"), servers, group_size=2))


async def test_batch_norm_is_not_warned_of() -> None:
    assert not warnings(await trained(lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()))


@pytest.mark.parametrize("exchange", EXCHANGES)
async def test_parameters_that_the_first_forward_sets_are_refused_where_workers_share_them(exchange: dict[str, Any]) -> None:
    result = await trained(lambda: Keeps(parameter=True), exchange)
    assert any(isinstance(error, TaskError) and "forward changes 'shift'" in str(error) for error in result.errors.values())


async def test_one_worker_may_set_parameters_in_its_forward() -> None:
    assert not warnings(await trained(lambda: Keeps(parameter=True), groups=1))


async def test_modules_in_evaluation_mode_are_warned_of() -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Dropout()), nn.Linear(6, 3)).double()
        made[0].eval()
        return made

    (text,) = warnings(await trained(model))
    assert "returned '0' in evaluation mode" in text
    assert not warnings(await trained(lambda: model().eval()))  # as a pretrained model is returned
