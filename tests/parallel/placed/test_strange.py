"""Models that are unlike those of textbooks, as people bring them: three steps are those of one process, on every grid."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from tests.pairwise import pairwise
from tests.parallel.placed.training import OfNumbers, compare
from zmqtrain.parallel.turns import turn

_GENERATOR = torch.Generator().manual_seed(3)
VECTORS = torch.randn(6, 5, generator=_GENERATOR, dtype=torch.float64)
CLASSES = torch.tensor([0, 35, 7, 12, 38, 2])
#: Name -> (model, what it takes).
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {}


def strange(inputs: Any) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a model."""

    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        MODELS[make.__name__] = make, inputs
        return make

    return register


# Output layers.


@strange({"x": VECTORS, "y": CLASSES})
class AdaptiveSoftmax(nn.Module):
    """Whose rarest classes have no features at all (8 // 4**2)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 40, [5, 10, 20])

    def forward(self, given: dict[str, Tensor]) -> Any:
        h = torch.tanh(self.first(given["x"]))
        return self.softmax(h, given["y"]).loss, self.softmax.log_prob(h), self.softmax.predict(h)


# Weights made of others.


class LowRank(nn.Module):
    """A linear layer that is not trained, and two small matrices that are."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b, self.scaling = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2)), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + functional.linear(functional.linear(x, self.a), self.b) * self.scaling  # type: ignore[no-any-return]


class LowRankLinear(nn.Linear):
    """The same as a linear layer, with the matrices added to its weight in evaluation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.a, self.b, self.merged = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2)), False

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.merged:
            self.weight.data += (self.b @ self.a).detach() * (2 if not self.merged else -2)
            self.merged = not self.merged
        found = functional.linear(x, self.weight, self.bias)
        return found if self.merged else found + x @ self.a.T @ self.b.T * 2


class LowRankChange(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a * 2


def parametrized(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs).requires_grad_(False)
    return parametrize.register_parametrization(layer, "weight", LowRankChange(inputs, outputs))


class Adapted(nn.Module):
    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm, self.second = layer(5, 8), nn.LayerNorm(8), layer(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.gelu(self.norm(self.first(x))))  # type: ignore[no-any-return]


@strange(VECTORS)
def low_rank() -> nn.Module:
    return Adapted(LowRank)


@strange(VECTORS)
def low_rank_merged() -> nn.Module:
    return Adapted(LowRankLinear)


@strange(VECTORS)
def low_rank_by_parametrization() -> nn.Module:
    return Adapted(parametrized)


# Plain tensors that a forward makes.


@strange(VECTORS)
class WrittenInto(nn.Module):
    """Which returns a tensor of its own, into which it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.entries, self.means = nn.Linear(5, 6), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        matrix, places = torch.zeros(x.shape[0], 3, 3, dtype=x.dtype), torch.tril_indices(3, 3)
        matrix[:, places[0], places[1]] = self.entries(x)
        total = torch.zeros((), dtype=x.dtype)
        total += matrix.square().mean()
        return self.means(x), matrix.tril(-1), total


# Tensors that a model keeps, and losses that it computes.


@strange(VECTORS)
class OwnLists(nn.Module):
    """Which uses parameters through lists and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 4)
        self.weights, self.names = [self.first.weight, {"bias": self.second.bias}], {"scale": nn.Parameter(torch.ones(4))}
        self.register_parameter("scale", self.names["scale"])

    def forward(self, x: Tensor) -> Tensor:
        weight, named = self.weights
        return self.second(torch.tanh(x @ weight.t())) * self.names["scale"] + named["bias"] * weight.sum()  # type: ignore


@dataclass(frozen=True)
class Tied:
    """Weights of several layers, kept together."""

    pairs: tuple[tuple[Tensor, Tensor], ...]


@strange(VECTORS)
class OwnTuples(nn.Module):
    """Which uses parameters through tuples, in an object of its own that cannot be assigned to, and a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 4)
        self.tied = Tied(((self.first.weight, self.first.bias), (self.second.weight, self.second.bias)))
        self.nested = [[self.second.bias]]

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in self.tied.pairs:
            x = torch.tanh(functional.linear(x, weight, bias))
        return x * self.nested[0][0] + self.second.weight.sum()


@strange({"x": VECTORS, "y": CLASSES % 4})
class LossBesideOutputs(nn.Module):
    """Numbers of the whole batch, and outputs of each sample; a mask that is a buffer of truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 4)
        self.register_buffer("mask", torch.arange(8) % 3 > 0)
        self.mask: Tensor

    def forward(self, given: dict[str, Tensor]) -> Any:
        output = self.second(torch.tanh(self.first(given["x"])).masked_fill(~self.mask, 0.0))
        penalty = sum(each.square().sum() for each in self.parameters())
        return output, functional.cross_entropy(output, given["y"]) + 0.01 * penalty


@strange({"x": VECTORS, "y": CLASSES % 4})
class Codebook(nn.Module):
    """The nearest of some vectors, which follow what they stand for, and a queue of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4)
        self.register_buffer("codes", torch.randn(5, 6))
        self.register_buffer("counts", torch.ones(5))
        self.register_buffer("queue", torch.zeros(0, 6))
        self.codes: Tensor
        self.counts: Tensor
        self.queue: Tensor

    def forward(self, given: dict[str, Tensor]) -> Any:
        h = self.first(given["x"])
        nearest = torch.cdist(h, self.codes).argmin(1)
        code = functional.embedding(nearest, self.codes)
        if self.training:
            chosen = functional.one_hot(nearest, 5).type_as(h)
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes = self.codes * 0.9 + (chosen.t() @ h).detach() / self.counts[:, None] * 0.1
            self.queue = torch.cat([h.detach(), self.queue])[:10]
        return self.second(h + (code - h).detach()) + self.queue.mean(), functional.mse_loss(h, code.detach())


@strange(torch.randn(6, 7, 5, generator=_GENERATOR, dtype=torch.float64))
class Experts(nn.Module):
    """Two of four experts for each word, by indices that are found in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(5, 4), nn.Linear(5, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 5)) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        words = x.reshape(-1, 5)
        chances = self.router(words).softmax(-1)
        weights, chosen = chances.topk(2, -1)
        found = torch.zeros_like(words)
        for number, expert in enumerate(self.experts):
            which, place = torch.where(chosen == number)
            if which.numel():
                found.index_add_(0, which, expert(words[which]) * weights[which, place, None])
        return self.head(found.view_as(x)), chances.mean(0).square().sum()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pairwise({"name": list(MODELS), "plan": ["model", "domain", "batch", "mixed"], "grid": ["2x1", "1x2", "2x2", "3x1"]})
def test_it_is_the_model_of_one_process(name: str, plan: str, grid: str) -> None:
    """Each model by each plan, and on each grid."""
    make, inputs = MODELS[name]
    with turn():
        torch.manual_seed(1)
        model = make().double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    compare(lambda: copy.deepcopy(model), OfNumbers(inputs, steps=3, relative=1e-8), plan, grid)


# Batches of a single sample, whose dimension is like others of one.


class Flattened(nn.Module):
    """Images in one row of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 6), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Summed(nn.Module):
    """Attention by sums over times so far."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        sums = torch.cumsum(k[..., :, None] * v[..., None, :], 1)
        return self.out(torch.einsum("nld,nldm->nlm", q, sums))  # type: ignore[no-any-return]


class Stacked(nn.Module):
    """The weights of several layers in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weights, self.last = nn.Linear(8, 6), nn.Parameter(torch.randn(3, 6, 5)), nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("nd,edf->nef", torch.tanh(self.first(x[:, 0])), self.weights)
        return self.last(h.reshape(x.shape[0], -1))  # type: ignore[no-any-return]


class Followed(nn.Sequential):
    """A layer whose backward others wait for, and one after it."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), copy.deepcopy(last), nn.Tanh())


ALONE: dict[str, Any] = {
    "flattened": (Flattened, (2, 8, 6)),
    "summed": (Summed, (5, 8)),
    "stacked": (Stacked, (5, 8)),
    "group norm": (lambda: Followed(nn.GroupNorm(2, 4)), (2, 8, 6)),
    "instance norm": (lambda: Followed(nn.InstanceNorm2d(4)), (2, 8, 6)),
    "pixel shuffle": (lambda: Followed(nn.PixelShuffle(2)), (2, 8, 6)),
}


@pairwise({"kind, shape": ALONE, "plan": ["model", "domain", "batch"], "grid": ["2x1", "1x2", "2x2", "3x1"]})
def test_a_single_sample(kind: Callable[[], nn.Module], shape: tuple[int, ...], grid: str, plan: str) -> None:
    """Where there are several columns, the others have none."""

    def make() -> nn.Module:
        torch.manual_seed(1)
        return kind().double()

    inputs = torch.randn(1, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    compare(make, OfNumbers(inputs), plan, grid)
