"""What a forward itself writes: parameters are refused, buffers and modes are warned of."""

from __future__ import annotations

from dataclasses import replace
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


async def test_a_buffer_that_counts_the_workers_own_samples_is_warned_of() -> None:
    class Counts(Keeps):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                self.kept += (inputs > 0).sum(0)
            return super().forward(inputs)

    def model() -> nn.Module:
        made = Counts()
        made.kept = made.kept.long()
        return made

    (text,) = warnings(await trained(model))
    assert "different values of the buffer 'kept'" in text


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


class Centered(nn.Module):
    """A loss with a running mean of its own, and perhaps a parameter."""

    def __init__(self, *, learns: bool = False) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=learns)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output - self.center, target) * self.scale
        with torch.no_grad():
            self.center.lerp_(output.mean(0), 0.5)
        return loss


async def loss_warnings(*, learns: bool, groups: int) -> list[str]:
    recipe = Recipe(model=Keeps, loss=nn.CrossEntropyLoss())
    shape = {"groups": groups, "group_size": 1, "batch_size": 8}
    made = lambda peer: replace(recipe(peer), loss=Centered(learns=learns))  # noqa: E731
    return warnings(await run(topology_of(job={"steps": 4}, compute=shape, exchange=EXCHANGES[0]), made))


async def test_what_a_loss_keeps_of_a_workers_own_samples_is_warned_of() -> None:
    (text,) = await loss_warnings(learns=False, groups=2)
    assert "'Task.loss.center'" in text
    assert not await loss_warnings(learns=False, groups=1)


async def test_parameters_of_a_loss_which_nobody_trains_are_warned_of() -> None:
    (text,) = await loss_warnings(learns=True, groups=1)
    assert "Task.loss has parameters ('scale'), which nobody trains" in text


def with_hook(hook: Any, *, late: bool = False) -> Any:
    def model() -> nn.Module:
        made = Keeps()
        parameter = made.layer.weight
        (parameter.register_post_accumulate_grad_hook if late else parameter.register_hook)(hook)
        return made

    return model


@pytest.mark.parametrize("exchange", EXCHANGES)
async def test_hooks_on_parameters_that_need_the_whole_gradient_are_refused(exchange: dict[str, Any]) -> None:
    for hook in (lambda g: g.clamp(-0.1, 0.1), lambda g: g / g.norm(), lambda g: g + torch.randn_like(g)):
        result = await trained(with_hook(hook), exchange)
        assert any(isinstance(error, TaskError) and "is not linear" in str(error) for error in result.errors.values())
    result = await trained(with_hook(lambda p: None, late=True), exchange)
    assert any("register_post_accumulate_grad_hook" in str(error) for error in result.errors.values())


async def test_linear_hooks_on_parameters_and_those_of_one_worker_are_not_refused() -> None:
    for hook in (lambda g: 0.1 * g, lambda g: None, lambda g: torch.zeros_like(g)):
        assert not (await trained(with_hook(hook))).errors
    assert not (await trained(with_hook(lambda g: g.clamp(-0.1, 0.1)), groups=1)).errors
    micro = await trained(with_hook(lambda g: g.clamp(-0.1, 0.1)), groups=1, accumulate=2)
    assert any("is not linear" in str(error) for error in micro.errors.values())


def synced() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("exchange", EXCHANGES)
async def test_sync_batch_norm_is_refused_where_it_would_see_a_part(exchange: dict[str, Any]) -> None:
    result = await trained(synced, exchange)
    assert any(isinstance(error, TaskError) and "'1' is a SyncBatchNorm" in str(error) for error in result.errors.values())
    assert not (await trained(synced, groups=1)).errors
