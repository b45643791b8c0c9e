"""LeNet on MNIST, from the four IDX files of the original distribution, gzipped or not.

    zmqtrain launch launch/mnist-async.toml --data DIR

DIR holds ``train-images-idx3-ubyte.gz`` and the other three, or a folder ``mnist`` with them.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from zmqtrain import Task
from zmqtrain.errors import UsageError

IMAGES, LABELS = 0x803, 0x801  # an IDX file begins with the kind of its content


def task(data: str, lr: float = 0.05, momentum: float = 0.9, warmup: int = 150, steps: int = 1000) -> Task:
    """``data`` is what ``--data`` or ZMQTRAIN_DATA says; the others come from ``[job] args``.

    The learning rate rises to ``lr`` over ``warmup`` steps of a group, and falls to almost nothing towards ``steps``.
    """
    folder = find(data)
    return Task(
        model=lenet,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=5e-4),
        train_data=load(folder, "train"),
        eval_data=load(folder, "t10k"),
        schedule=lambda optimizer: LambdaLR(optimizer, lambda step: min((step + 1) / warmup, max(0.02, 1 - step / steps))),
    )


def lenet() -> nn.Module:
    """The LeNet of Caffe's MNIST example, with a ReLU after each convolution: 431,080 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


def find(data: str) -> Path:
    """The folder with the IDX files: ``data`` itself, or ``mnist`` in it."""
    for folder in (Path(data), Path(data, "mnist")):
        if any(folder.glob("train-images-idx3-ubyte*")):
            return folder
    raise UsageError(
        f"no MNIST in {data}: expected train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
        "t10k-labels-idx1-ubyte there (or in a folder `mnist` there), each as it is or as .gz"
    )


def load(folder: Path, part: str) -> TensorDataset:
    """Images as float32 (N, 1, 28, 28) with mean 0 and deviation 1, labels as int64 (N)."""
    images = read_idx(folder / f"{part}-images-idx3-ubyte", IMAGES).float().div_(255).sub_(0.1307).div_(0.3081)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte", LABELS).long()
    return TensorDataset(images.unsqueeze(1), labels)


def read_idx(file: Path, kind: int) -> Tensor:
    """The uint8 tensor in an IDX file: kind, sizes (both big-endian), then the bytes."""
    zipped = file.with_name(file.name + ".gz")
    if zipped.exists():
        content = gzip.decompress(zipped.read_bytes())
    elif file.exists():
        content = file.read_bytes()
    else:
        raise UsageError(f"there is neither {file} nor {zipped.name} beside it")
    magic, *shape = np.frombuffer(content, ">i4", count=1 + (kind & 0xFF)).tolist()
    if magic != kind:
        raise UsageError(f"{file} is no IDX file of the kind {kind:#x}: it begins with {magic:#x}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).copy().reshape(shape))
