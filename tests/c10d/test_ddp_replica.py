"""The replica of a model under DistributedDataParallel: what its exchange is told, and what the model gets back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zmqtrain.c10d.ddp_replica import SETTING, DdpReplica
from zmqtrain.errors import PeerLostError, PeerTimeoutError, TaskError, UsageError
from zmqtrain.exchange.base import Bucket


class Told:
    """An event loop that calls at once, and an exchange that writes down what it is told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.buckets: list[Bucket] = []

    def call_soon_threadsafe(self, function: Callable[..., object], *arguments: object) -> None:
        function(*arguments)

    def begin_step(self, step: int) -> None:
        self.steps.append(step)

    def bucket_ready(self, bucket: Bucket) -> None:
        self.buckets.append(bucket)

    async def end_step(self) -> None: ...

    async def settle(self) -> None: ...


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()


def replica_of(module: nn.Module, told: Any, timeout_s: float = 5.0) -> DdpReplica:
    replica = DdpReplica(module, torch.optim.SGD(module.parameters(), lr=0.1), 2, 1, None, timeout_s)
    replica.connect(told, told)
    for bucket in replica.buckets:
        replica.parameters_ready(bucket)
    replica.take()
    return replica


def flat(bucket: Bucket) -> Tensor:
    return bucket.gradients.tensor  # type: ignore[attr-defined, no-any-return]


def backward(replica: DdpReplica, parameters: list[nn.Parameter]) -> None:
    for number, parameter in enumerate(parameters):
        replica.add(parameter, torch.full_like(parameter, 2.0 * (number + 1)))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_buckets_leave_in_order_whatever_comes_first(order: list[int]) -> None:
    told, module = Told(), model()
    replica = replica_of(module, told)
    parameters = list(module.parameters())
    for step in range(2):
        backward(replica, [parameters[index] for index in order])
        assert [bucket.index for bucket in told.buckets] == [0, 1, 2, 3]
        assert told.steps == list(range(step + 1))
        asyncio.run(replica.finish_step())
        for bucket in told.buckets:
            replica.parameters_ready(bucket)
        replica.take()
        told.buckets.clear()


def test_gradients_count_by_the_share_of_a_group_and_parameters_come_back() -> None:
    told, module = Told(), model()
    replica = replica_of(module, told)
    backward(replica, list(module.parameters()))
    assert torch.equal(flat(told.buckets[3]), torch.ones(12, dtype=torch.float64))  # half of what came first
    for bucket in told.buckets:
        bucket.parameters.scale_(0.0)
        replica.parameters_ready(bucket)
    assert all(bool(parameter.any()) for parameter in module.parameters()), "not before they are taken"
    replica.take()
    assert not any(bool(parameter.any()) for parameter in module.parameters())


def test_a_second_backward_in_a_step_is_refused() -> None:
    told, module = Told(), model()
    replica = replica_of(module, told)
    parameters = list(module.parameters())
    backward(replica, parameters)
    first = flat(told.buckets[0]).clone()
    with pytest.raises(TaskError, match=r"'0\.weight' got its gradient twice in one step.*ModelServers\.step\(\)"):
        backward(replica, parameters[::-1][-1:])
    assert torch.equal(flat(told.buckets[0]), first), "what may have left is not written to"


def test_a_step_without_all_gradients_is_refused() -> None:
    module = model()
    replica = replica_of(module, Told())
    with pytest.raises(RuntimeError, match=r"after loss\.backward\(\)"):
        asyncio.run(replica.finish_step())
    backward(replica, list(module.parameters())[1:])
    with pytest.raises(RuntimeError, match=r"after loss\.backward\(\)"):
        asyncio.run(replica.finish_step())


def test_waiting_for_parameters_ends_at_the_time_out_and_when_aborted() -> None:
    told, module = Told(), model()
    replica = replica_of(module, told, timeout_s=0.01)
    backward(replica, list(module.parameters()))
    with pytest.raises(PeerTimeoutError, match="the model servers") as caught:
        replica.take()
    assert caught.value.setting == SETTING
    replica.abort(PeerLostError("server/1", "gone", waiting_for="parameters"))
    with pytest.raises(PeerLostError, match="server/1"):
        replica.take()


def _loaded(module: nn.Module) -> None:
    module.load_state_dict({name: tensor + 1.0 for name, tensor in module.state_dict().items()})


def _data_changed(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.9)


def _stepped(module: nn.Module) -> None:
    module[1].bias.grad = torch.ones_like(module[1].bias)  # type: ignore[index]
    torch.optim.SGD(module.parameters(), lr=0.1).step()


def _exchanged_for_a_while(module: nn.Module) -> None:
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    _loaded(module)
    module.load_state_dict(kept)


@pytest.mark.parametrize("change", [_loaded, _data_changed, _stepped])
def test_parameters_that_a_program_changes_are_not_set_back_without_a_word(change: Callable[[nn.Module], None]) -> None:
    told, module = Told(), model()
    replica = replica_of(module, told)
    change(module)
    backward(replica, list(module.parameters()))
    with pytest.raises(UsageError, match=r"the parameter '.*' was changed since ModelServers last set it.*load a model before"):
        replica.require_taken()


@pytest.mark.parametrize("change", [_exchanged_for_a_while, lambda module: None])
def test_parameters_that_are_as_before_are_no_change(change: Callable[[nn.Module], None]) -> None:
    told, module = Told(), model()
    replica = replica_of(module, told)
    change(module)
    backward(replica, list(module.parameters()))
    replica.require_taken()


def test_a_change_that_is_meant() -> None:
    told, module = Told(), model()
    replica = replica_of(module, told)
    _loaded(module)
    replica.accept()
    backward(replica, list(module.parameters()))
    replica.require_taken()
