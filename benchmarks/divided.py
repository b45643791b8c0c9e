"""What a divided model's own code takes of a processor: steps of tiny models, whose arithmetic takes next to nothing.

Ranks are threads of this process, and messages cross a table in it. Processor time is that of all ranks, over their number.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.case import Case, case_of
from zmqtrain.parallel import parallelize
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.sums import GradientSums
from zmqtrain.testing.threads import run_ranks

GRIDS = ("1x1", "1x2", "2x1")
BATCH, WARM, STEPS, ROUNDS = 4, 3, 10, 7


class Block(nn.Module):
    """A residual block, with a projection where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.project = nn.Conv2d(before, after, 1, stride=stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.second(functional.relu(self.norm1(self.first(x)))))
        return functional.relu(out + (x if self.project is None else self.project(x)))


class ResNet(nn.Module):
    """Three residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(4, 4, 1), Block(4, 6, 2), Block(6, 6, 1))
        self.classifier = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.adaptive_avg_pool2d(self.blocks(torch.relu(self.stem(x))), 1)
        return self.classifier(x.flatten(1))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """A transformer's block as libraries write it: operators, and not one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.num_heads = 4

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (each(h).view(h.shape[0], h.shape[1], 4, -1).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        weights = torch.softmax(q @ k.transpose(-2, -1) / 2.0, -1)
        x = x + self.o_proj((weights @ v).transpose(1, 2).reshape(h.shape[0], h.shape[1], -1))
        x = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return x.mean(1)


def perceptron() -> nn.Module:
    """Four linear layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((12, 16), (16, 16), (16, 16)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, 5))


#: Name -> (model, shape of a sample).
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet of 8 convolutions": (ResNet, (3, 12, 12)),
    "transformer block": (Attention, (6, 16)),
    "perceptron of 4 layers": (perceptron, (12,)),
}


def bench_divided() -> Iterator[Case]:
    """A case for each model and grid; the peer is the ordinary model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, (make, shape) in MODELS.items():
            ordinary: list[float] = []
            divided: dict[str, list[float]] = {grid: [] for grid in GRIDS}
            for _ in range(ROUNDS):
                ordinary.append(ordinary_ms(make, shape))
                for grid in GRIDS:
                    divided[grid].append(divided_ms(make, shape, Grid.parse(grid)))
            for grid, found in divided.items():
                value, peer = statistics.median(found), statistics.median(ordinary)
                yield case_of("divided", f"{name}, {grid}", value, "ms of CPU a step", "ordinary", peer, digits=3)
    finally:
        torch.set_num_threads(before)


def ordinary_ms(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> float:
    """A step of the model in one process."""
    model, inputs = make(), torch.randn(BATCH, *shape)
    return _timed(lambda: model(inputs).square().mean().backward())


def divided_ms(make: Callable[[], nn.Module], shape: tuple[int, ...], grid: Grid) -> float:
    """A step of one process of the grid; all of its layers are model-parallel over the rows that can be."""
    models, inputs = [make() for _ in range(grid.size)], torch.randn(BATCH, *shape)

    def run(fabric: Fabric) -> float:
        torch.set_num_threads(1)  # it is each thread's
        model = parallelize(models[fabric.rank], grid, fabric=fabric)
        shards = model.shards_by_name() if hasattr(model, "shards_by_name") else {}
        sums = GradientSums(model, fabric, shards)
        model.batch.size = BATCH
        start, stop = model.samples(BATCH)

        def step() -> None:
            model.batch.step += 1
            model(inputs[start:stop]).square().mean().backward()
            sums.finish()

        return _timed(step)

    found, _ = run_ranks(grid.size, run)
    return max(found) / grid.size


def _timed(step: Callable[[], object]) -> float:
    """Milliseconds of this process's processor time; with ranks that are threads, those of all ranks."""
    for _ in range(WARM):
        step()
    begin = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - begin) / STEPS * 1e3
