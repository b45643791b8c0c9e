"""Tasks that are drawn by a seed, on which `make_new_tasks.py` tries the search: it was not made on any of them.

Each is a small model on data that another one has made, with noise, so that hundreds of trainings take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from zmqtrain import Task


def task(kind: str, seed: int, noise: float, width: int, scale: float, samples: int = 2048) -> Task:
    """``noise``: how much of it there is. ``width``: of hidden layers. ``scale``: of the inputs, and so of good learning rates."""
    make: dict[str, Callable[..., Task]] = {
        "cnn": cnn,
        "mlp": mlp,
        "lstm": lstm,
        "transformer": transformer,
        "linear": linear,
        "factors": factors,
        "autoencoder": autoencoder,
        "logistic": logistic,
    }
    return make[kind](torch.Generator().manual_seed(seed), noise, width, scale, samples)


def cnn(generator: torch.Generator, noise: float, width: int, scale: float, samples: int) -> Task:
    """Images of ten patterns, in noise."""
    patterns = torch.randn(10, 1, 12, 12, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    images = scale * (patterns[labels] + noise * torch.randn(samples, 1, 12, 12, generator=generator))

    def model() -> nn.Module:
        first = [nn.Conv2d(1, width // 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(width // 4, width // 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(9 * (width // 2), width), nn.ReLU(), nn.Linear(width, 10))

    return _task(model, nn.functional.cross_entropy, images, labels)


def mlp(generator: torch.Generator, noise: float, width: int, scale: float, samples: int) -> Task:
    """A function that another network with three layers computes, of which some labels are wrong."""
    inputs = torch.randn(samples, 20, generator=generator)
    hidden = torch.tanh(inputs @ torch.randn(20, 30, generator=generator) / 3)
    labels = (hidden @ torch.randn(30, 5, generator=generator)).argmax(1)
    wrong = torch.rand(samples, generator=generator) < noise / 20
    labels = torch.where(wrong, torch.randint(5, (samples,), generator=generator), labels)

    def model() -> nn.Module:
        layers = [nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5)]
        return nn.Sequential(*layers)

    return _task(model, nn.functional.cross_entropy, scale * inputs, labels)


def lstm(generator: torch.Generator, noise: float, width: int, scale: float, samples: int) -> Task:
    """The next number of a wave whose frequency and phase differ from one passage to the next."""
    frequency, phase = torch.rand(2, samples, 1, generator=generator)
    wave = torch.sin((0.3 + frequency) * torch.arange(13) + 6.3 * phase)
    wave = (wave + 0.1 * noise * torch.randn(samples, 13, generator=generator)).unsqueeze(2)
    return _task(lambda: Lstm(width), nn.functional.mse_loss, scale * wave[:, :-1], wave[:, 1:])


def transformer(generator: torch.Generator, noise: float, width: int, scale: float, samples: int) -> Task:
    """Which of the eight symbols of a passage comes most often, some of them exchanged."""
    favourite = torch.randint(8, (samples,), generator=generator)
    symbols = torch.randint(8, (samples, 10), generator=generator)
    keeps = torch.rand(samples, 10, generator=generator) < 0.6 - noise / 20
    symbols = torch.where(keeps, favourite.unsqueeze(1), symbols)
    return _task(lambda: Transformer(width, scale), nn.functional.cross_entropy, symbols, favourite)


def linear(generator: torch.Generator, noise: float, width: int, scale: float, samples: int) -> Task:
    """Linear regression, with directions of very different weight."""
    inputs = torch.randn(samples, width, generator=generator) * torch.logspace(0, -1, width)
    outputs = inputs @ torch.randn(width, 1, generator=generator) + 0.2 * noise * torch.randn(samples, 1, generator=generator)
    return _task(lambda: nn.Sequential(nn.Linear(width, 1)), nn.functional.mse_loss, scale * inputs, outputs)


def factors(generator: torch.Generator, noise: float, width: int, scale: float, samples: int) -> Task:
    """A matrix of rank four from some of its entries."""
    left, right = torch.randn(2, 60, 4, generator=generator)
    places = torch.randint(60, (samples, 2), generator=generator)
    values = (left[places[:, 0]] * right[places[:, 1]]).sum(1) / 2
    values = values + 0.2 * noise * torch.randn(samples, generator=generator)
    return _task(lambda: Factors(width // 4, scale), nn.functional.mse_loss, places, values)


def autoencoder(generator: torch.Generator, noise: float, width: int, scale: float, samples: int) -> Task:
    """Points near a curved surface of five dimensions, through a bottleneck."""
    inputs = torch.tanh(torch.randn(samples, 5, generator=generator) @ torch.randn(5, 24, generator=generator))
    inputs = scale * (inputs + 0.1 * noise * torch.randn(samples, 24, generator=generator))

    def model() -> nn.Module:
        layers = [nn.Linear(24, width), nn.Tanh(), nn.Linear(width, 6), nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 24)]
        return nn.Sequential(*layers)

    return _task(model, nn.functional.mse_loss, inputs, inputs)


def logistic(generator: torch.Generator, noise: float, width: int, scale: float, samples: int) -> Task:
    """Softmax regression on clusters that lie in each other."""
    centres = torch.randn(8, width, generator=generator)
    labels = torch.randint(8, (samples,), generator=generator)
    inputs = scale * (centres[labels] + (1 + noise) * torch.randn(samples, width, generator=generator))
    return _task(lambda: nn.Sequential(nn.Linear(width, 8)), nn.functional.cross_entropy, inputs, labels)


class Lstm(nn.Module):
    """Passages (N, length, 1) to the next numbers (N, length, 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.output = nn.Linear(width, 1)

    def forward(self, passages: Tensor) -> Tensor:
        numbers: Tensor = self.output(self.lstm(passages)[0])
        return numbers


class Transformer(nn.Module):
    """Symbols (N, length) to scores (N, symbols)."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.embedding = nn.Embedding(8, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.three, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scores = nn.Linear(width, 8)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.scale * self.embedding(symbols)
        query, key, value = self.three(self.before(x)).unsqueeze(1).chunk(3, 3)
        x = x + self.joined(nn.functional.scaled_dot_product_attention(query, key, value).squeeze(1))
        x = x + self.narrow(nn.functional.relu(self.wide(self.between(x))))
        scores: Tensor = self.scores(x.mean(1))
        return scores


class Factors(nn.Module):
    """Places (N, 2) to entries (N)."""

    def __init__(self, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.left, self.right = nn.Embedding(60, rank), nn.Embedding(60, rank)

    def forward(self, places: Tensor) -> Tensor:
        return self.scale * (self.left(places[:, 0]) * self.right(places[:, 1])).sum(1)


def _task(model: Callable[[], nn.Module], loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Task:
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    return Task(model=model, loss=loss, optimizer=optimizer, train_data=TensorDataset(inputs, targets))
