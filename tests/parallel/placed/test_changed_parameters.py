"""Forwards that change parameters and buffers themselves: as in one process, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.parallel.placed.training import Training, compare
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.turns import turn
from zmqtrain.testing.threads import run_ranks

GRIDS = ["2x1", "1x2", "2x2"]
INPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
Change = Callable[[nn.Parameter, nn.Parameter], Any]


class Momentum(nn.Module):
    """An encoder, and a second one that the forward moves towards it."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.query, self.key, self.head = nn.Linear(4, 6), nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for own, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                    self.change(own, key)
        h = torch.tanh(self.query(x))
        return self.head(h) + (h * self.key(x)).sum(-1, keepdim=True)  # type: ignore[no-any-return]


def data(own: nn.Parameter, key: nn.Parameter) -> None:
    key.data = key.data * 0.9 + own.data * 0.1


def data_of_detached(own: nn.Parameter, key: nn.Parameter) -> None:
    key.data = key.detach() * 0.9 + own.detach() * 0.1


def clone(own: nn.Parameter, key: nn.Parameter) -> None:
    key.data = own.data.clone()


def data_changed_afterwards(own: nn.Parameter, key: nn.Parameter) -> None:
    value = key.data * 0.9
    key.data = value
    value.add_(own.data, alpha=0.1)


def data_added_to(own: nn.Parameter, key: nn.Parameter) -> None:
    key.data *= 0.9
    key.data += own.data * 0.1


def data_in_place(own: nn.Parameter, key: nn.Parameter) -> None:
    key.data.mul_(0.9).add_(own.data, alpha=0.1)


def data_copied(own: nn.Parameter, key: nn.Parameter) -> None:
    key.data.copy_(key.data * 0.9 + own.data * 0.1)


def detached(own: nn.Parameter, key: nn.Parameter) -> None:
    key.detach().mul_(0.9)
    key.detach().add_(own.detach() * 0.1)


def lerp(own: nn.Parameter, key: nn.Parameter) -> None:
    key.lerp_(own, 0.1)


def lists(own: nn.Parameter, key: nn.Parameter) -> None:
    torch._foreach_mul_([key], 0.9)
    torch._foreach_add_([key], [own], alpha=0.1)


def some_rows(own: nn.Parameter, key: nn.Parameter) -> None:
    key[1:4] = own[1:4]
    key[0] *= 2


def some_rows_of_data(own: nn.Parameter, key: nn.Parameter) -> None:
    key.data[1:4] = key.data[1:4] * 0.5 + own.data[1:4]
    key.detach()[0] *= 2
    key.data[2:].mul_(0.9)


def without_a_rule(own: nn.Parameter, key: nn.Parameter) -> None:
    key.index_copy_(0, torch.tensor([0, 4]), own[2:4])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    "change",
    [
        data, data_of_detached, clone, data_changed_afterwards, data_added_to, data_in_place, data_copied, detached, lerp,
        lists, some_rows, some_rows_of_data, without_a_rule,
    ],
)  # fmt: skip
def test_an_encoder_that_follows_another(change: Change, grid: str) -> None:
    compare(made(lambda: Momentum(change)), Training(INPUTS, steps=3), "model", grid)


def memory_of_another(own: nn.Parameter, key: nn.Parameter) -> None:
    key.data = own.data


def memory_that_others_see(own: nn.Parameter, key: nn.Parameter) -> None:
    before = key.data
    key.data = own * 2
    key.data.add_(before)


def part_of_a_vector(own: nn.Parameter, key: nn.Parameter) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([own]), [key])


def plain(own: nn.Parameter, key: nn.Parameter) -> None:
    key.data = torch.ones(tuple(key.shape), dtype=key.dtype)


def other_memory(own: nn.Parameter, key: nn.Parameter) -> None:
    key.set_(own * 2)  # type: ignore[call-overload]


def other_gradient(own: nn.Parameter, key: nn.Parameter) -> None:
    key.grad = torch.ones_like(key)


def training(own: nn.Parameter, key: nn.Parameter) -> None:
    key.requires_grad_(True)


def swapped(own: nn.Parameter, key: nn.Parameter) -> None:
    torch.utils.swap_tensors(own, key)


@pytest.mark.parametrize(
    "change",
    [memory_of_another, memory_that_others_see, part_of_a_vector, plain, other_memory, other_gradient, training, swapped],
)
def test_what_is_refused(change: Change) -> None:
    refused(made(lambda: Momentum(change)), r"its '(weight|bias)'")


class Changing(nn.Module):
    """Whose forward does something to its parameters or buffers first."""

    def __init__(self, change: Callable[[Changing, Tensor], Any]) -> None:
        super().__init__()
        self.change = change
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(6))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return self.second(torch.tanh(self.first(x)) * self.scale) + self.seen.sum()  # type: ignore[no-any-return]


def normalized(model: Changing, x: Tensor) -> None:
    model.first.weight.data = functional.normalize(model.first.weight.data, dim=1)


def clamped(model: Changing, x: Tensor) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.3, 0.3)


def data_of_a_buffer(model: Changing, x: Tensor) -> None:
    model.seen.data = model.seen.data * 0.9 + 1


def data_of_an_activation(model: Changing, x: Tensor) -> None:
    found = model.first(x).detach()
    found.data = found.data * 2 + 1
    model.seen = found.mean(0)


def buffer_registered(model: Changing, x: Tensor) -> None:
    model.register_buffer("late", model.first(x).mean(0).detach())
    model.seen = model.seen + model.late  # type: ignore[operator]


def buffer_registered_again(model: Changing, x: Tensor) -> None:
    before = model.seen
    del model.seen
    model.register_buffer("seen", before * 0.9 + 1)


def buffer_that_grows(model: Changing, x: Tensor) -> None:
    model.seen = torch.cat([model.seen, model.first(x).mean(0).detach()])


def state_loaded(model: Changing, x: Tensor) -> None:
    model.load_state_dict({name: each * 0.9 for name, each in model.state_dict().items()})


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    "change",
    [
        normalized, clamped, data_of_a_buffer, data_of_an_activation, buffer_registered, buffer_registered_again, buffer_that_grows,
        state_loaded,
    ],
)  # fmt: skip
def test_a_forward_that_changes_its_model(change: Callable[[Changing, Tensor], Any], grid: str) -> None:
    compare(made(lambda: Changing(change)), Training(INPUTS, steps=3), "model", grid)


def another_parameter(model: Changing, x: Tensor) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach() * 0.9)


def no_bias(model: Changing, x: Tensor) -> None:
    model.first.bias = None  # type: ignore[assignment]


def new_parameter(model: Changing, x: Tensor) -> None:
    model.register_parameter("late", nn.Parameter(torch.ones(6, dtype=torch.float64)))


def new_module(model: Changing, x: Tensor) -> None:
    if not hasattr(model, "late"):
        model.late = nn.Linear(6, 6)


@pytest.mark.parametrize(
    ("change", "what"),
    [(another_parameter, "'weight'"), (no_bias, "'bias'"), (new_parameter, "parameter 'late'"), (new_module, "layer late")],
)
def test_parameters_are_those_of_the_constructor(change: Callable[[Changing, Tensor], Any], what: str) -> None:
    refused(made(lambda: Changing(change)), what)


def test_parameters_are_parameters_in_the_forward() -> None:
    found: list[bool] = []

    def look(model: Changing, x: Tensor) -> None:
        found.extend(isinstance(each, nn.Parameter) for each in (model.first.weight, model.scale, model.seen))

    compare(made(lambda: Changing(look)), Training(INPUTS, steps=1), "model", "2x1")
    assert found == [True, True, False] * (len(found) // 3)


class Averaged(nn.Module):
    """A model and its average, which its forward takes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5))
        self.average = AveragedModel(self.model, **settings).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.update_parameters(self.model)
        with torch.no_grad():
            target = self.average(x)
        return self.model(x) + (self.model(x) - target).square()  # type: ignore[no-any-return]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("settings", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"use_buffers": True}])
def test_an_averaged_model_within_the_model(settings: dict[str, Any], grid: str) -> None:
    compare(made(lambda: Averaged(**settings)), Training(INPUTS, steps=3), "model", grid)


def made(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    with turn():
        torch.manual_seed(1)
        model = make().double()
    return lambda: copy.deepcopy(model)


def refused(make: Callable[[], nn.Module], what: str) -> None:
    def run(fabric: Fabric) -> None:
        model = parallelize(make(), "2x1", fabric=fabric)
        model.batch.size = len(INPUTS)

        def forwards() -> None:
            for _ in range(2):
                model(INPUTS)

        with pytest.raises(UsageError, match=what):
            forwards()

    run_ranks(2, run)
