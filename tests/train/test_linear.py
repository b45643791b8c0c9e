"""Linear layers that write their gradients in place compute what linear layers compute."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from zmqtrain.train.linear import SlottedLinear, write_gradients_to

SHAPES = [(4, 6), (2, 3, 6), (6,), (0, 6), (2, 1, 5, 6)]


def layer(*, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(6, 5, bias=bias, dtype=torch.float64)


def slotted(bias: bool = True) -> tuple[nn.Linear, Tensor]:
    module, memory = layer(bias=bias), torch.full((5, 6), 7.0, dtype=torch.float64)
    write_gradients_to(module, lambda: memory.detach())
    return module, memory


def trained(module: nn.Module, inputs: Tensor) -> list[Tensor | None]:
    inputs = inputs.clone().requires_grad_()
    result = module(inputs)
    (result * torch.arange(result.numel(), dtype=torch.float64).view(result.shape)).sum().backward()
    return [result.detach(), inputs.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_those_of_a_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    inputs = torch.randn(shape, dtype=torch.float64)
    module, memory = slotted(bias)
    for found, expected in zip(trained(module, inputs), trained(layer(bias=bias), inputs), strict=True):
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)
    assert module.weight.grad is not None
    assert module.weight.grad.data_ptr() == memory.data_ptr()


def test_where_there_is_no_memory_autograd_makes_it() -> None:
    module = layer()
    write_gradients_to(module, lambda: None)
    inputs = torch.randn(4, 6, dtype=torch.float64)
    for found, expected in zip(trained(module, inputs), trained(layer(), inputs), strict=True):
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


def test_gradients_of_gradients_are_right() -> None:
    module, _ = slotted()
    assert torch.autograd.gradgradcheck(
        lambda x, weight, bias: torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,)),
        (torch.randn(3, 6, dtype=torch.float64, requires_grad=True), *(p.detach().requires_grad_() for p in module.parameters())),
    )
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    found, plain = module.weight.grad, layer()
    (slope,) = torch.autograd.grad(plain(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert found is not None
    assert plain.weight.grad is not None
    assert torch.allclose(found, plain.weight.grad, rtol=1e-12)


def test_a_frozen_weight_and_an_evaluation_ask_for_nothing() -> None:
    module = layer()
    write_gradients_to(module, lambda: pytest.fail("nothing is to be written"))
    module.weight.requires_grad_(False)
    trained(module, torch.randn(4, 6, dtype=torch.float64))
    module.weight.requires_grad_(True)
    with torch.no_grad():
        module(torch.randn(4, 6, dtype=torch.float64))


def test_a_copy_is_an_ordinary_layer() -> None:
    """Averages of models are kept in copies: what they compute must not touch the buckets."""
    module, memory = slotted()
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    for other in (copy.deepcopy(module), torch.load(stored, weights_only=False)):
        before = memory.clone()
        with torch.no_grad():
            other.weight.add_(1)
        inputs = torch.randn(4, 6, dtype=torch.float64)
        assert not torch.equal(other(inputs), module(inputs))
        trained(other, inputs)
        assert torch.equal(memory, before)


def test_it_looks_like_a_linear_layer_and_becomes_one_again() -> None:
    module = layer()
    undo = write_gradients_to(module, lambda: None)
    assert isinstance(module, SlottedLinear)
    assert repr(module) == repr(layer())
    assert list(module.state_dict()) == ["weight", "bias"]
    undo()
    assert type(module) is nn.Linear
    assert "slot" not in module.__dict__


def test_casting_automatically_goes_as_before() -> None:
    module = layer().float()
    write_gradients_to(module, lambda: pytest.fail("nothing is to be written"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = module(torch.randn(4, 6))
    assert result.dtype == torch.bfloat16
    result.float().sum().backward()
