"""The two phases of a model together are the model."""

from __future__ import annotations

import copy
from collections.abc import Callable

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
    assert {name.rpartition(".")[0] or name for name, _ in second.named_parameters()} == behind
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


@pytest.mark.parametrize(
    ("make", "split", "said"),
    [
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
