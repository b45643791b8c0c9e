"""The two phases of a model together are the model."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples import shakespeare
from tests.train.shipped_models import Lstm, alexnet, cifarnet, lenet, resnet50, vgg16
from zmqtrain.errors import UsageError
from zmqtrain.merged_fc.phases import Phase, split_model


class Custom(nn.Module):
    """A skip around the linear layers, dropout by the mode, and a head that is only there while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.fc1 = nn.Linear(64, 64)
        self.fc2 = nn.Linear(64, 3)
        self.early = nn.Linear(64, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).flatten(1)
        y = functional.dropout(torch.relu(self.fc1(x)), 0.5, training=self.training)
        out: Tensor = self.fc2(x + y) * self.scale
        return out + self.early(x) if self.training else out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.position = nn.Parameter(torch.randn(5, 6))
        self.lstm = nn.LSTM(6, 7, batch_first=True)
        self.inner = nn.Linear(7, 7)
        self.scores = nn.Linear(7, 11)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x) + self.position)
        scores: Tensor = self.scores(torch.tanh(self.inner(states)))
        return scores


class Branching(nn.Module):
    """Cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if x.sum() > 0 else -self.conv(x)


class Halved(torch.autograd.Function):
    """Its backward cannot be found by following its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / 2


class Decaying(nn.Linear):
    """A layer with a buffer that it changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mean", torch.ones(inputs))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        mean: Tensor = self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)  # type: ignore[operator,union-attr]
        return super().forward(x - mean)


class Unusual(nn.Module):
    """What a graph might lose: parts without gradients, functions with a backward of their own, layers with two names, weights that
    are computed of parameters, values of buffers, and modules with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Sequential(nn.Conv2d(4, 4, 1))
        self.second.register_full_backward_hook(lambda module, before, after: (before[0] * 3,))
        self.fc, self.normed = nn.Linear(64, 6), nn.Linear(6, 5)
        self.last = Decaying(5, 3)
        self.head = nn.Sequential(self.fc, nn.Tanh())
        self.register_buffer("scales", torch.tensor([0.5, 2.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            still = self.conv(x)
        found = Halved.apply((self.second(self.conv(x)) + still).flatten(1))  # type: ignore[no-untyped-call]
        weight = self.normed.weight / self.normed.weight.norm()
        found = functional.linear(self.head(found), weight, self.normed.bias)
        out: Tensor = self.last(found) * self.scales[:2].exp().sum()  # type: ignore[index]
        return out


def images(side: int = 4, channels: int = 1) -> Tensor:
    return torch.randn(5, channels, side, side)


CASES: dict[str, tuple[Callable[[], nn.Module], str | None, Callable[[], Tensor], set[str]]] = {
    "lenet": (lenet, None, lambda: images(28), {"ip1", "ip2"}),
    "cifarnet": (cifarnet, "ip2", lambda: images(32, 3), {"ip2"}),
    "custom": (Custom, None, images, {"fc1", "fc2", "scale"}),
    "custom, named": (Custom, "fc2", images, {"fc2", "scale"}),
    "recurrent": (Recurrent, None, lambda: torch.randint(11, (3, 5)), {"scores"}),
    "lstm of the examples": (lambda: shakespeare.Lstm(11, 8), None, lambda: torch.randint(11, (3, 5)), {"scores"}),
    "transformer of the examples": (
        lambda: shakespeare.Transformer(11, 8, 5),
        None,
        lambda: torch.randint(11, (3, 5)),
        {"scores"},
    ),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3)), nn.Flatten(), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))),
        None,
        images,
        {"2.0", "2.1"},
    ),
    "unusual": (Unusual, None, images, {"fc", "head.0", "normed", "last"}),
    "not traced in part": (
        lambda: nn.Sequential(Branching(), nn.Flatten(), nn.Linear(16, 4)),
        None,
        images,
        {"2"},
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("make", "split", "inputs", "behind"), CASES.values(), ids=CASES.keys())
def test_together_they_are_the_model(
    make: Callable[[], nn.Module], split: str | None, inputs: Callable[[], Tensor], behind: set[str], training: bool
) -> None:
    torch.manual_seed(1)
    whole = make()
    first = split_model(copy.deepcopy(whole), "convolution", split)
    second = split_model(copy.deepcopy(whole), "fc", split)
    assert {name.rpartition(".")[0] or name for name, _ in second.named_parameters(remove_duplicate=False)} == behind
    assert repr(first)
    assert {**first.state_dict(), **second.state_dict()}.keys() == whole.state_dict().keys()
    assert not first.state_dict().keys() & second.state_dict().keys()
    for each in (whole, first, second):
        each.train(training)
    x = inputs()
    torch.manual_seed(2)
    expected = whole(x)
    torch.manual_seed(2)
    passed = first(x)
    assert isinstance(passed, tuple)
    found = second(*passed)
    assert torch.equal(found, expected)
    for name, buffer in (*first.named_buffers(), *second.named_buffers()):
        assert torch.equal(buffer, whole.get_buffer(name)), name
    expected.square().sum().backward()
    found.square().sum().backward()
    gradients = {name: parameter.grad for phase in (first, second) for name, parameter in phase.named_parameters()}
    for name, parameter in whole.named_parameters():
        if parameter.grad is None:
            assert gradients[name] is None, name
        else:
            torch.testing.assert_close(gradients[name], parameter.grad)  # sums in another order


@pytest.mark.parametrize(
    ("make", "behind"),
    [(alexnet, {"fc6", "fc7", "fc8"}), (vgg16, {"fc6", "fc7", "fc8"}), (resnet50, {"fc"}), (Lstm, {"scores"})],
)
def test_large_models_are_split_behind_their_convolutions(make: Callable[[], nn.Module], behind: set[str]) -> None:
    with torch.device("meta"):
        phase = split_model(make(), "fc")
    assert {name.rpartition(".")[0] for name in phase.state_dict()} == behind


def test_the_mode_of_the_model_stays_and_sizes_are_of_the_whole() -> None:
    model = lenet().eval()
    phase = split_model(model, "fc")
    assert isinstance(phase, Phase)
    assert not phase.training
    assert phase.sizes == {"conv1": 520, "conv2": 25050, "ip1": 400500, "ip2": 5010}
    assert not phase.writes_inputs
    assert split_model(nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU(inplace=True), nn.Linear(2, 2)), "fc", "1").writes_inputs


class Tied(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(7, 7, bias=False)
        self.scores.weight = self.inner.weight


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 1, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.fc(self.conv(x))
        conv: Tensor = self.conv(x)
        return conv


class Meter:
    def __init__(self) -> None:
        self.seen = 0


class Once(nn.Module):
    """Does something in its forward that its graph would not do in every step, unless a module of its own does it."""

    def __init__(self, does: Callable[[Any], object]) -> None:
        super().__init__()
        self.does, self.calls, self.kept = does, 0, torch.ones(2)
        self.sizes, self.stats, self.left = [3, 4], {"runs": {"train": 0}}, {"a", "b"}
        self.sums = [torch.ones(3), torch.ones(2)]
        self.meter, self.options, self.shape, self.mode = Meter(), SimpleNamespace(scale=1.0), (1, 2), "first"
        self.conv, self.fc = nn.Conv2d(1, 1, 3), nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(()))

    made = 0

    def forward(self, x: Tensor) -> Tensor:
        self.does(self)
        found: Tensor = self.fc(self.conv(x).flatten(1) * self.count * 0)
        return found


def _counts(model: Any) -> None:
    model.calls += 1


def _assigns(model: Any) -> None:
    model.count = model.count + 1


def _writes(model: Any) -> None:
    model.kept *= 2


def _counts_for_all(model: Any) -> None:
    type(model).made += 1


def _counts_in_a_dictionary(model: Any) -> None:
    model.stats["runs"]["train"] += 1


def _counts_beside(model: Any) -> None:
    model.meter.seen += 1


def _scales(model: Any) -> None:
    model.options.scale /= 2


def _replaces_a_tuple(model: Any) -> None:
    model.shape = (*model.shape[:1], model.shape[1] + 1)


def _switches(model: Any) -> None:
    model.mode = "other"


def _trains_another(model: Any) -> None:
    model.fc.weight = nn.Parameter(torch.zeros(2, 4))


ONCE: dict[str, Callable[[Any], object]] = {
    "draws random numbers (rand)": lambda model: torch.rand(()) < 0.5,
    "draws from Python's or numpy's random numbers": lambda model: random.random() < 0.5,
    "changes the attribute 'calls'": _counts,
    "changes the attribute 'made'": _counts_for_all,
    "changes the attribute 'sizes'": lambda model: model.sizes.pop(0),
    "changes the attribute 'sums'": lambda model: model.sums.__setitem__(0, torch.zeros(3)),
    "changes the attribute 'stats'": _counts_in_a_dictionary,
    "changes the attribute 'left'": lambda model: model.left.discard("a"),
    "changes the attribute 'meter'": _counts_beside,
    "changes the attribute 'options'": _scales,
    "changes the attribute 'shape'": _replaces_a_tuple,
    "changes the attribute 'mode'": _switches,
    "assigns the parameter 'weight'": _trains_another,
    "assigns the buffer 'count'": _assigns,
    "changes a tensor that a module keeps as an attribute": _writes,
    "uses torch.autocast": lambda model: torch.autocast("cpu").__enter__(),
}


@pytest.mark.parametrize("said", ONCE)
def test_what_a_graph_would_do_only_once_is_refused_or_not_traced(said: str) -> None:
    model = Once(ONCE[said])
    weight = model.fc.weight
    with pytest.raises(UsageError, match=f"its forward {re.escape(said)}.*Do it in a module of its own"):
        split_model(model, "fc")
    assert (model.calls, float(model.count), float(model.kept.sum()), Once.made) == (0, 0.0, 2.0, 0), "as it was"
    assert (model.sizes, model.stats, model.left) == ([3, 4], {"runs": {"train": 0}}, {"a", "b"})
    assert (model.meter.seen, model.options.scale, model.shape, model.mode) == (0, 1.0, (1, 2), "first")
    assert model.fc.weight is weight
    assert [float(each.sum()) for each in model.sums] == [3.0, 2.0]
    within = nn.Sequential(Once(ONCE[said]), nn.Linear(2, 2))
    first = split_model(within, "convolution", "1")
    module = first.get_submodule("0")
    assert isinstance(module, Once)
    module.does = _counts
    first(torch.ones(1, 1, 4, 4))
    assert module.calls == 1


class Recorded(nn.Module):
    """What is new where nothing was, is a record or a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 1, 3), nn.Linear(4, 2)
        self.outputs: list[Tensor] = []
        self.caches: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(self.conv(x).flatten(1))
        self.outputs.append(found)
        self.caches["output"] = found
        self.last = found
        return found


def test_records_of_a_trace_are_not_kept() -> None:
    model = Recorded()
    phase = split_model(model, "fc")
    assert isinstance(phase, Phase)
    assert (model.outputs, model.caches, model.last) == ([], {}, None)


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Linear(2, 2))
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


class ChangedByBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 1, 3), nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.scale[:1].mul_(0.9)  # type: ignore[operator,index]
        found: Tensor = self.fc(self.conv(x * self.scale)) * self.scale
        return found


@pytest.mark.parametrize(
    ("make", "split", "said"),
    [
        (_hooked, None, r"called with hooks of its own \(forward_hooks\)"),
        (ChangedByBoth, None, "both use scale, which the forward changes"),
        (Tied, None, "both use the parameter inner.weight = scores.weight. Untie it"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "0", "nothing before the split has parameters"),
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten()), "1", "nothing behind the split has parameters"),
        (Forked, "fc", "does not depend on that module"),
        (Branching, None, "torch.fx cannot trace its forward"),
        (lambda: nn.Linear(2, 2), None, "a single layer"),
        (lenet, "classifier", r"no such module; .*its modules are conv1, pool1"),
    ],
)
def test_what_cannot_be_split_is_said(make: Callable[[], nn.Module], split: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        split_model(make(), "fc", split)
