"""Three small tasks on which `make_tuning.py` compares ways to tune: LeNet, CIFARNet and a character LSTM, made narrower.

They are as deep as the ones in ``examples/`` and see fewer samples, so that dozens of whole trainings take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from examples import cifar10, mnist, shakespeare
from zmqtrain import Task


def lenet(data: str, samples: int = 12000) -> Task:
    """LeNet with 8 and 16 channels and 64 hidden units on MNIST at half its resolution."""
    images, labels = mnist.load(mnist.find(data), "train").tensors
    images = nn.functional.avg_pool2d(images[:samples], 2)

    def model() -> nn.Module:
        first = [nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        return _begun(nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 10)))

    return _task(model, nn.functional.cross_entropy, TensorDataset(images, labels[:samples]))


def cifarnet(data: str, samples: int = 20000) -> Task:
    """CIFARNet with 8, 8 and 16 channels and 32 hidden units on CIFAR-10 at half its resolution."""
    images, labels = cifar10.load(cifar10.find(data), cifar10.TRAIN).tensors
    images = nn.functional.avg_pool2d(images[:samples], 2)

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]

    def model() -> nn.Module:
        convolutions = [*block(3, 8), *block(8, 8), *block(8, 16)]
        return _begun(nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))

    return _task(model, nn.functional.cross_entropy, TensorDataset(images, labels[:samples]))


def lstm(data: str, length: int = 12, samples: int = 20000) -> Task:
    """A character LSTM 32 wide, on passages of 12 characters."""
    text, characters = shakespeare.read(data)
    passages = shakespeare.Passages(text, length)
    inputs = torch.stack([passages[index][0] for index in range(samples)])
    targets = torch.stack([passages[index][1] for index in range(samples)])
    return _task(lambda: Lstm(characters), shakespeare.loss, TensorDataset(inputs, targets))


class Lstm(nn.Module):
    """Passages (N, length) to scores (N, length, characters)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.scores = nn.Linear(32, characters)

    def forward(self, passages: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.lstm(self.embedding(passages))[0])
        return scores


def _begun(model: nn.Module) -> nn.Module:
    """With initial weights as large as ReLUs need (He et al. 2015), so that it learns at once, and guesses first."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        else:
            nn.init.zeros_(parameter)
    nn.init.zeros_(list(model.parameters())[-2])
    return model


def _task(model: Callable[[], nn.Module], loss: Callable[[Tensor, Tensor], Tensor], data: TensorDataset) -> Task:
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    return Task(model=model, loss=loss, optimizer=optimizer, train_data=data)
