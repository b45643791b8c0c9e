"""``python -m benchmarks loader``: the share of a step in which a worker waits for its data, images with ordinary augmentation."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.case import Case, case_of
from zmqtrain.errors import ZmqTrainError
from zmqtrain.train.task import Task

IMAGES, SIZE, CROP, CLASSES = 512, 72, 64, 10
BATCH, STEPS = 32, 40
#: The first steps wait for processes that have only just been started.
WARM_UP = 5
_TOPOLOGY = f"""
[job]
task = "{Path(__file__)}:task"
steps = {STEPS}
oversubscribe = true
[compute]
batch_size = {BATCH}
threads = 1
"""


class Images(Dataset[tuple[Tensor, int]]):
    """Images of bytes, as they are decoded, with random crop, flip and normalisation."""

    def __init__(self) -> None:
        self._images = torch.randint(256, (IMAGES, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        self._mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
        self._spread = torch.tensor([0.229, 0.224, 0.225])[:, None, None]

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left = torch.randint(SIZE - CROP + 1, (2,)).tolist()
        image = self._images[index, :, top : top + CROP, left : left + CROP]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return (image.float() / 255 - self._mean) / self._spread, index % CLASSES


def network() -> nn.Module:
    """A small convolutional network, as people train on images of this size."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def task(workers: int = 0) -> Task:
    """What is launched."""
    return Task(
        model=network,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train_data=Images(),
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def bench_loader(workers: Sequence[int] = (0, 2)) -> Iterator[Case]:
    """Cases for each number of loader processes, beside a plain loop over torch's DataLoader.

    Raises `ZmqTrainError` where a launch fails."""
    for count in workers:
        ours, step_s = _launched(count)
        theirs, _ = _plain(count)
        how = f"{count} loader processes" if count else "a thread"
        peer = f"a plain loop, num_workers = {count}"
        yield case_of("loader", f"waiting for data, {how}", 100 * ours, "% of a step", peer, 100 * theirs, digits=3)
        yield case_of("loader", f"a step, {how}", step_s * 1e3, "ms", digits=1)


def _launched(workers: int) -> tuple[float, float]:
    """Share of the time that steps wait for data, and seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "bench.toml").write_text(_TOPOLOGY, encoding="utf-8")
        command = [sys.executable, "-m", "zmqtrain", "launch", "--json", "--run-dir", "run", "bench.toml"]
        command += ["--set", f"job.args.workers={workers}"]
        done = subprocess.run(command, cwd=path, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise ZmqTrainError(f"the launch failed with code {done.returncode}: {done.stderr[-2000:]}")
        events: list[dict[str, Any]] = [json.loads(line) for line in (path / "run" / "events.jsonl").read_text().splitlines()]
    steps = [event["values"] for event in events if event["kind"] == "step" and event["step"] >= WARM_UP]
    return _share([step["data_s"] for step in steps], [step["seconds"] for step in steps])


def _plain(workers: int) -> tuple[float, float]:
    """The same of a loop in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(
            Images(), batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0
        )
        waits: list[float] = []
        steps: list[float] = []
        while len(steps) < STEPS:
            began = time.perf_counter()
            for images, target in loader:
                waits.append(time.perf_counter() - began)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), target).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                steps.append(time.perf_counter() - began)
                began = time.perf_counter()
        return _share(waits[WARM_UP:STEPS], steps[WARM_UP:STEPS])
    finally:
        torch.set_num_threads(before)


def _share(waits: Sequence[float], steps: Sequence[float]) -> tuple[float, float]:
    return sum(waits) / sum(steps), sum(steps) / len(steps)
