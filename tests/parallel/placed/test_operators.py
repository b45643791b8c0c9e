"""Plain torch code on placed tensors gives what it gives on plain ones: values, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.parallel.placed.world import Given, check
from zmqtrain.errors import UsageError

SAMPLES = 5
_GENERATOR = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_GENERATOR, dtype=torch.float64)


SEQUENCE = numbers(SAMPLES, 6, 4)  # (samples, time, features)
IMAGE = numbers(SAMPLES, 3, 6, 6)
WEIGHT, BIAS = numbers(8, 4), numbers(8)
BY_TIME = [Given(SEQUENCE, 0, 1)]
BY_FEATURES = [Given(SEQUENCE, 0, 2)]
IN_STRIPS = [Given(IMAGE, 0, 2)]


def changed_in_place(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 0] = 3.0
    y[:, 1] += x[:, 2]
    return y


def put(x: Tensor) -> Tensor:
    y = x.clone()
    y[torch.tensor([0, 2])] = 0.0
    y[:, torch.tensor([1])] *= 3
    return y


def views_of_one(x: Tensor) -> Tensor:
    y = x.clone()
    flat = y.view(SAMPLES, -1)
    flat.mul_(2)
    y.transpose(1, 2).add_(1)
    return y * flat.sum()


def hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient * gradient.abs().max())
    return y * y


def complex_product(x: Tensor, weight: Tensor) -> Tensor:
    """Whose backward multiplies by conjugates."""
    return (torch.view_as_complex(x.view(SAMPLES, 6, 2, 2)) * torch.view_as_complex(weight)).abs()


def penalty(x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return gradient * 2


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.exp()


def lstm(x: Tensor, *weights: Tensor) -> Tensor:
    state = torch.zeros(1, SAMPLES, 3, dtype=x.dtype)
    return torch.lstm(x, (state, state), weights, True, 1, 0.0, True, False, True)[0]


def gru(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.gru(x, torch.zeros(1, SAMPLES, 3, dtype=x.dtype), weights, True, 1, 0.0, True, False, True)[0]


def attention(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    found = functional.multi_head_attention_forward(
        x, x, x, 4, 2, weight, None, None, None, False, 0.0, out, None, need_weights=False
    )
    return found[0]


def orthogonal(x: Tensor, weight: Tensor) -> Tensor:
    """What `torch.nn.utils.parametrizations.orthogonal` makes of a weight that is not square."""
    lower = weight.tril(-1)
    product = torch.linalg.householder_product(lower, 2 / (1 + lower.square().sum(0)))
    return functional.linear(x, torch.eye(8, dtype=x.dtype).flip(0) @ product)


#: Name -> (what is computed, of what). On all grids.
CASES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "linear": (functional.linear, [Given(SEQUENCE), WEIGHT, BIAS]),
    "linear by outputs": (functional.linear, [Given(SEQUENCE), Given(WEIGHT, None, 0), Given(BIAS, None, 0)]),
    "linear by inputs": (functional.linear, [Given(SEQUENCE, 0, 2), Given(WEIGHT, None, 1), BIAS]),
    "pointwise": (lambda x: x.relu() * 2 + 1, BY_TIME),
    "a scale without dimensions": (lambda x, s: x * s, [*BY_TIME, torch.tensor(1.5, dtype=torch.float64)]),
    "layer scale": (lambda x, s: x * s.view(1, -1, 1), [*BY_TIME, numbers(6)]),
    "positions": (lambda x, s: x + s, [*BY_TIME, numbers(6, 4)]),
    "layer norm": (lambda x, s, c: functional.layer_norm(x, (4,), s, c), [*BY_TIME, numbers(4), numbers(4)]),
    "layer norm of what is divided": (lambda x, s, c: functional.layer_norm(x, (4,), s, c), [*BY_FEATURES, numbers(4), numbers(4)]),
    "group norm": (lambda x, s, c: functional.group_norm(x, 3, s, c), [*BY_TIME, numbers(6), numbers(6)]),
    "instance norm": (functional.instance_norm, BY_TIME),
    "batch norm": (lambda x, s, c: functional.batch_norm(x, None, None, s, c, True), [*BY_TIME, numbers(6), numbers(6)]),
    "root mean square norm": (lambda x, w: functional.rms_norm(x, (4,), w), [*BY_TIME, numbers(4)]),
    "deviation of all": (lambda x: x / x.std(), BY_TIME),
    "mean of samples": (lambda x: x - x.mean(0), BY_TIME),
    "mean of all": (lambda x: x - x.mean(), BY_TIME),
    "views": (lambda x: x.view(SAMPLES, -1).tanh().view(SAMPLES * 6, 4) * 2, BY_TIME),
    "view of a transpose": (lambda x: x.transpose(1, 2).reshape(SAMPLES, 2, 12), BY_FEATURES),
    "softmax": (lambda x: x.softmax(-1) + x.log_softmax(1), BY_TIME),
    "matmul": (lambda x: x @ x.transpose(1, 2), BY_TIME),
    "batch of products": (torch.bmm, [Given(SEQUENCE), Given(numbers(SAMPLES, 4, 3), 0, 2)]),
    "einsum": (lambda x, w: torch.einsum("bij,kj->bki", x, w), [*BY_TIME, WEIGHT]),
    "product over samples": (lambda x: x.flatten(0, 1).t() @ x.flatten(0, 1), BY_TIME),
    "in place": (lambda x: (x * 1).add_(1).relu_(), BY_TIME),
    "parts in place": (changed_in_place, BY_TIME),
    "indices in place": (put, BY_TIME),
    "views in place": (views_of_one, BY_TIME),
    "convolution": (lambda x, w, b: functional.conv2d(x, w, b, padding=1), [Given(IMAGE), numbers(4, 3, 3, 3), numbers(4)]),
    "convolution of strips": (lambda x, w: functional.conv2d(x, w, padding=1), [*IN_STRIPS, Given(numbers(4, 3, 3, 3), None, 0)]),
    "pooling": (lambda x: functional.max_pool2d(x, 2), IN_STRIPS),
    "adaptive pooling": (lambda x: functional.adaptive_avg_pool2d(x, (2, 3)), IN_STRIPS),
    "resizing": (lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), IN_STRIPS),
    "unfolding": (lambda x: functional.unfold(x, 2), IN_STRIPS),
    "pixel shuffle": (lambda x: functional.pixel_shuffle(x, 2), [Given(numbers(SAMPLES, 8, 3, 3), 0, 1)]),
    "padding": (lambda x: functional.pad(x, (1, 1)), BY_TIME),
    "attention by heads": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        [Given(numbers(SAMPLES, 2, 6, 4), 0, 1)],
    ),
    "attention by time": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        [Given(numbers(SAMPLES, 2, 6, 4), 0, 2)],
    ),
    "multi-head attention": (attention, [Given(numbers(6, SAMPLES, 4), 1), numbers(12, 4), numbers(4, 4)]),
    "lstm": (lstm, [Given(SEQUENCE), numbers(12, 4), numbers(12, 3), numbers(12), numbers(12)]),
    "gru": (gru, [Given(SEQUENCE), numbers(9, 4), numbers(9, 3), numbers(9), numbers(9)]),
    "chunks": (lambda x: sum(part * number for number, part in enumerate(x.chunk(3, 1))), BY_TIME),
    "gather": (lambda x: x.gather(1, x.argsort(1)), BY_TIME),
    "indices": (lambda x: x[:, [0, 2, 1]], BY_TIME),
    "mask": (lambda x: x.masked_fill(x > 0, 1.0), BY_TIME),
    "where": (lambda x: torch.where(torch.ones(6, 4).triu() > 0, x, x * 2), BY_TIME),
    "embedding": (lambda w: functional.embedding(torch.arange(5) % 3, w), [Given(WEIGHT, None, 0)]),
    "bags": (lambda w: functional.embedding_bag(torch.arange(6).view(3, 2) % 5, w, mode="mean"), [Given(WEIGHT, None, 0)]),
    "cat": (lambda x, y: torch.cat([x, y.expand(SAMPLES, -1, -1)], 1), [*BY_TIME, numbers(1, 1, 4)]),
    "norm": (lambda x: x / x.norm(dim=-1, keepdim=True), BY_TIME),
    "cross-entropy": (lambda x: functional.cross_entropy(x, torch.arange(SAMPLES) % 4), [Given(numbers(SAMPLES, 4), 0, 1)]),
    "a number": (lambda x: x * x.sum().item(), BY_TIME),
    "numbers": (lambda x: x * x.tolist()[0][0][0] * float(x.detach().numpy()[1, 1, 1]), BY_TIME),
    "a branch": (lambda x: x * 2 if (x > 0).any() else x, BY_TIME),
    "samples of all": (lambda x, w: functional.linear(x, w).sum(1), [Given(SEQUENCE, 0, None, "all"), WEIGHT]),
    "two placements": (lambda x, y: x * y, [Given(SEQUENCE, 0, None, "all"), Given(SEQUENCE, 0, 1)]),
    "prelu": (functional.prelu, [*BY_TIME, numbers(6)]),
    "weight norm": (lambda x, v, g: functional.linear(x, torch._weight_norm(v, g, 0)), [Given(SEQUENCE), WEIGHT, numbers(8, 1)]),
    "orthogonal weight": (orthogonal, [*BY_FEATURES, WEIGHT]),
    "a weight used twice": (lambda x, w: functional.linear(functional.linear(x, w), w.t()) + w.sum(), [Given(SEQUENCE), WEIGHT]),
    "roll": (lambda x: x.roll(2, 1), BY_TIME),
    "cumulative sum": (lambda x: x.cumsum(1), BY_TIME),
    "unbind": (lambda x: x.unbind(1)[2].unsqueeze(-1).squeeze(-1), BY_FEATURES),
    "iteration over samples": (lambda x: torch.stack([row * number for number, row in enumerate(x)]), BY_TIME),
    "tensor split": (lambda x: torch.cat([part.sum(2, keepdim=True) for part in torch.tensor_split(x, 2, 0)], 0), BY_TIME),
    "sizes that depend on values": (lambda x: x[x > 0].sum(), BY_TIME),
    "a function of one's own": (Exponential.apply, BY_TIME),
    "gradient penalty": (penalty, BY_TIME),
    "a tensor's hook": (hooked, BY_TIME),
    "checkpointing": (lambda x: checkpoint(lambda y: y.tanh() @ y.transpose(1, 2), x, use_reentrant=False), BY_TIME),
    "reentrant checkpointing": (lambda x: checkpoint(lambda y: y.tanh() @ y.transpose(1, 2), x, use_reentrant=True), BY_TIME),
    "vmap": (lambda x: torch.vmap(lambda y: y.sin())(x), BY_TIME),
    "data": (lambda x: (x * 1).data.mul_(2) + x, BY_TIME),
    "complex numbers": (complex_product, [*BY_TIME, numbers(6, 2, 2)]),
    "conjugates": (lambda x: (torch.view_as_complex(x.view(SAMPLES, 6, 2, 2)).conj() * 1j).conj().imag.neg(), BY_TIME),
    "fourier transform": (lambda x: torch.fft.fft(x).abs(), BY_TIME),
    "sort of all": (lambda x: x.flatten().sort()[0], BY_TIME),
    "one-hot": (lambda x: functional.one_hot((x > 0).long()).to(x.dtype) * x.unsqueeze(-1), BY_TIME),
    "another type": (lambda x: x.float().double(), BY_TIME),
    "out": (lambda x: torch.mul(x.detach(), 2, out=torch.empty_like(x)), BY_TIME),
}


@pytest.mark.parametrize("grid", ["1x1", "2x2", "3x1"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_plain_tensors(name: str, grid: str) -> None:
    function, given = CASES[name]
    check(function, given, grid)


TWICE = [
    name
    for name, (_, given) in CASES.items()
    if any(isinstance(each, Given) and each.divided is not None and each.across is not None for each in given)
]


@pytest.mark.parametrize("name", TWICE)
def test_tensors_of_which_two_dimensions_are_divided(name: str) -> None:
    function, given = CASES[name]
    check(function, given, "4x1", both=True)


def test_a_change_in_place_of_conjugate_numbers_is_refused() -> None:
    def run(x: Tensor) -> Tensor:
        y = torch.view_as_complex(x.view(SAMPLES, 6, 2, 2)).clone()
        y.conj().mul_(2)
        return y.abs()

    with pytest.raises(UsageError, match="changed in place while others are views of it"):
        check(run, BY_TIME, "2x2", gradients=False)


def test_a_change_in_place_that_views_would_not_see_is_refused() -> None:
    def run(x: Tensor) -> Tensor:
        y = x.clone()
        part = y[:, :, :2]
        y.view(-1)  # time is brought together for it, and the part stays divided
        return part.mul_(2) + y.sum()

    with pytest.raises(UsageError, match=r"changed in place while others are views of it, .*: change a clone\(\) of it"):
        check(run, BY_TIME, "2x2", gradients=False)
