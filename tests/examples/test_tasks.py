"""The examples' tasks build and learn; those that need data are skipped where it is absent."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from examples import cifar10, digits, logistic, mnist, quadratic, shakespeare
from zmqtrain import Task
from zmqtrain.errors import UsageError
from zmqtrain.topology.load import load_topology
from zmqtrain.topology.placement import place

ROOT = Path(__file__).parents[2]
TOPOLOGIES = sorted((ROOT / "launch").glob("*.toml"))


def real_data() -> Path:
    """ZMQTRAIN_DATA, or ``shared/data`` beside the checkout."""
    for folder in (os.environ.get("ZMQTRAIN_DATA"), ROOT.parent / "shared" / "data"):
        if folder and Path(folder).exists():
            return Path(folder)
    pytest.skip("no data: set ZMQTRAIN_DATA to a folder with mnist/ and shakespeare.txt")


def losses(task: Task, steps: int = 3) -> list[float]:
    """The losses of a few steps on one batch."""
    torch.manual_seed(1)
    model = task.model()
    optimizer = task.optimizer(list(model.parameters()))
    batch = default_collate([task.train_data[index] for index in range(16)])
    inputs, target = task.transform(batch) if task.transform else batch
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    for metric in (task.metrics or {}).values():
        assert 0 <= metric(model(inputs), target).item() <= 1
    return found


def test_digits_learns() -> None:
    task = digits.task()
    assert len(task.train_data) + len(task.eval_data) == 1797
    found = losses(task)
    assert found[-1] < found[0]


def test_mnist_learns() -> None:
    task = mnist.task(str(real_data()), lr=0.01, warmup=1)
    assert (len(task.train_data), len(task.eval_data)) == (60_000, 10_000)
    found = losses(task)
    assert found[-1] < found[0]


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_reads_idx_files_plain_and_zipped(tmp_path: Path, zipped: bool) -> None:
    for part, count in (("train", 20), ("t10k", 5)):
        images = np.array([0x803, count, 28, 28], ">i4").tobytes() + bytes(range(28)) * 28 * count
        labels = np.array([0x801, count], ">i4").tobytes() + bytes(index % 10 for index in range(count))
        for name, content in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            if zipped:
                (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (tmp_path / name).write_bytes(content)
    task = mnist.task(str(tmp_path))
    image, label = task.train_data[13]
    assert image.shape == (1, 28, 28)
    assert label == 3
    assert image[0, 5, 7].item() == pytest.approx((7 / 255 - 0.1307) / 0.3081, rel=1e-5)


def test_cifar10_reads_binary_batches_and_learns(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    for name in (*cifar10.TRAIN, "test_batch.bin"):
        records = generator.integers(0, 256, (8, cifar10.RECORD), np.uint8)
        records[:, 0] %= 10
        records.tofile(tmp_path / name)
    task = cifar10.task(str(tmp_path))
    assert (len(task.train_data), len(task.eval_data)) == (40, 8)
    found = losses(task)
    assert found[-1] < found[0]


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_shakespeare_learns(tmp_path: Path, model: str) -> None:
    (tmp_path / "shakespeare.txt").write_text("To be, or not to be, that is the question.\n" * 40)
    task = shakespeare.task(str(tmp_path), model=model, width=32, length=16)  # type: ignore[arg-type]
    found = losses(task)
    assert found[-1] < found[0]


def test_logistic_regression_learns() -> None:
    found = losses(logistic.task())
    assert found[-1] < found[0]


def test_the_quadratics_optimum_is_where_it_says() -> None:
    task = quadratic.task(dimensions=5, noise=2.0, samples=500)
    model = task.model()
    with torch.no_grad():
        model.w.fill_(quadratic.OPTIMUM)
    x, target = task.train_data.tensors
    task.loss(model(x), target).backward()
    assert model.w.grad is not None
    assert model.w.grad.abs().max() < 1e-5
    assert task.metrics is not None
    with torch.no_grad():
        assert float(task.metrics["distance"](model(task.eval_data.tensors[0]), None)) == 0.0


@pytest.mark.parametrize(("task", "expected"), [(mnist.task, "train-images-idx3-ubyte"), (cifar10.task, "data_batch_1.bin"),
                                                (shakespeare.task, "shakespeare.txt")])  # fmt: skip
def test_missing_data_is_said_with_what_is_expected(tmp_path: Path, task: object, expected: str) -> None:
    assert callable(task)
    with pytest.raises(UsageError, match=expected):
        task(str(tmp_path))


def test_broken_data_is_said(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(bytes(100))
    with pytest.raises(UsageError, match="no IDX file"):
        mnist.task(str(tmp_path))
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(100))
    with pytest.raises(UsageError, match="not made of records"):
        cifar10.task(str(tmp_path))


@pytest.mark.parametrize("file", TOPOLOGIES, ids=lambda file: file.stem)
def test_topology_files_load_and_place(file: Path) -> None:
    topology = load_topology(file)
    placement = place(topology)
    assert placement.world_size == topology.compute.workers
    if topology.job.task is not None:
        assert (ROOT / topology.job.task.split(":")[0]).is_file()
