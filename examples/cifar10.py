"""A small convolutional network on CIFAR-10, from the binary batches of the original distribution.

    zmqtrain launch launch/cifar10.toml --data DIR

DIR holds ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, or a folder ``cifar10`` with them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from zmqtrain import Task
from zmqtrain.errors import UsageError

TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
RECORD = 1 + 3 * 32 * 32  # the label, then red, green and blue


def task(data: str, lr: float = 0.02, momentum: float = 0.6, weight_decay: float = 1e-3) -> Task:
    """``data`` is what ``--data`` or ZMQTRAIN_DATA says; the others come from ``[job] args``."""
    folder = find(data)
    return Task(
        model=network,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay),
        train_data=load(folder, TRAIN),
        eval_data=load(folder, ("test_batch.bin",)),
        transform=flip_and_shift,
    )


def network() -> nn.Module:
    """Three convolutions with pooling, then two linear layers: the shape of Caffe's CIFARNet, 145,578 parameters."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]

    return nn.Sequential(
        *block(3, 32), *block(32, 32), *block(32, 64), nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def flip_and_shift(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Augment a batch: mirror half of its images, and shift all of them by up to four pixels."""
    images, labels = batch
    mirrored = torch.rand(len(images)) < 0.5
    images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    down, right = torch.randint(0, 9, (2,)).tolist()
    return nn.functional.pad(images, (4, 4, 4, 4))[:, :, down : down + 32, right : right + 32], labels


def find(data: str) -> Path:
    """The folder with the batches: ``data`` itself, or ``cifar10`` in it."""
    for folder in (Path(data), Path(data, "cifar10")):
        if (folder / TRAIN[0]).exists():
            return folder
    raise UsageError(
        f"no CIFAR-10 in {data}: expected {TRAIN[0]} to {TRAIN[-1]} and test_batch.bin there, or in a folder `cifar10`"
    )


def load(folder: Path, names: tuple[str, ...]) -> TensorDataset:
    """Images as float32 (N, 3, 32, 32) from -2 to 2, labels as int64 (N)."""
    for name in names:
        if not (folder / name).exists() or (folder / name).stat().st_size % RECORD:
            raise UsageError(f"{folder / name} is missing, or not made of records of {RECORD} bytes")
    records = np.concatenate([np.fromfile(folder / name, np.uint8).reshape(-1, RECORD) for name in names])
    images = torch.from_numpy(records[:, 1:].astype(np.float32)).div_(63.75).sub_(2).view(-1, 3, 32, 32)
    return TensorDataset(images, torch.from_numpy(records[:, 0].astype(np.int64)))
