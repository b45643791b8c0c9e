"""Handwritten digits with a small convolutional network: the task to read first.

    zmqtrain launch launch/digits.toml

The 1,797 images of 8x8 pixels come with scikit-learn (``pip install 'zmqtrain[examples]'``), so nothing is downloaded.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from zmqtrain import Task


def task(lr: float = 0.05, momentum: float = 0.8) -> Task:
    """What to train. The arguments come from ``[job] args`` in the topology file."""
    train, test = load()
    return Task(
        model=network,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=1e-4),
        train_data=train,
        eval_data=test,
    )


def network() -> nn.Module:
    """Two convolutions and two linear layers, 40,000 parameters. Every worker calls this with the same seed."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test data: every fifth image is for the test."""
    from sklearn.datasets import load_digits  # here: it takes seconds, and who needs the network alone need not wait

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])
