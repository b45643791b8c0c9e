"""Whole parameters that a forward has seen are those of the next forward, unless something has become of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.placed.training import OfNumbers, compare
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.placed.model import ParallelModel, parallelize
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.testing.threads import run_ranks


class Hooked(nn.Module):
    """Doubles the gradient of a weight by a hook of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.register_hook(lambda gradient: gradient * 2)
        found: Tensor = self.linear(x)
        return found


class Plain(nn.Module):
    """Uses a weight by a layer, and by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) * self.linear.weight.sum()
        return found


def other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 1.5


def other_parameters(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach() * 1.5)


def frozen(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def another_layer(model: nn.Module) -> None:
    inner = model._inner[0] if isinstance(model, ParallelModel) else model
    inner.extra = nn.ReLU()  # type: ignore[assignment]


def nothing(model: nn.Module) -> None:
    pass


def gradients(model: nn.Module, between: Callable[[nn.Module], None], backward: Callable[[], None]) -> list[Tensor | None]:
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        backward()
        if step == 0:
            between(model)
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


@pytest.mark.parametrize("between", [nothing, other_memory, other_parameters, frozen, another_layer])
def test_gradients_are_of_what_the_parameters_are_then(between: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(1)
    models = [Plain().double() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    x = torch.randn(2, 3, dtype=torch.float64)

    def alone() -> None:
        for parameter in models[0].parameters():
            parameter.__dict__.pop("_backward_hooks", None)
        plain = {
            name: parameter.detach().requires_grad_(parameter.requires_grad) for name, parameter in models[0].named_parameters()
        }
        torch.func.functional_call(models[0], plain, (x,)).square().sum().backward()
        for name, parameter in models[0].named_parameters():
            parameter.grad = plain[name].grad

    def run(fabric: Fabric) -> list[Tensor | None]:
        model = parallelize(models[1 + fabric.rank], "2x1", fabric=fabric)
        model.batch.size = 2

        def backward() -> None:
            model(x).square().sum().backward()
            sum_gradients(model, fabric, model.shards_by_name())

        return gradients(model, between, backward)

    expected = gradients(models[0], between, alone)
    results, _ = run_ranks(2, run)
    for number, whole in enumerate(expected):
        parts = [found[number] for found in results]
        assert (whole is None) == (parts[0] is None)
        if whole is not None:
            torch.testing.assert_close(torch.cat([each for each in parts if each is not None]), whole)


def test_a_hook_that_would_see_a_part_of_a_gradient_is_refused() -> None:
    def run(fabric: Fabric) -> None:
        model = parallelize(Hooked(), "2x1", fabric=fabric)
        model.batch.size = 2
        with pytest.raises(UsageError, match=r"layer linear.*weight"):
            model(torch.ones(2, 3))

    run_ranks(2, run)


class ByFunctions(nn.Module):
    """Uses its weights in functions that have been given them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 4), nn.Parameter(torch.ones(4))
        weight, bias = self.linear.weight, self.linear.bias
        self.by_variable = [lambda x: x @ weight.T]
        self.by_argument = partial(torch.add, other=bias)
        self.linear.register_forward_hook(partial(self.scaled, self.scale))

    @staticmethod
    def scaled(scale: Tensor, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.tanh(self.by_argument(self.by_variable[0](x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("grid", ["2x1", "1x2", "3x1"])
def test_functions_that_have_been_given_parameters_use_what_these_are(grid: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return ByFunctions().double()

    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    compare(make, OfNumbers(inputs, steps=3), "model", grid)
