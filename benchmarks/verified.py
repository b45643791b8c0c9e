"""``python -m benchmarks verified``: what comparing a divided ResNet-50 with the ordinary one takes of a processor.

Ranks are threads of this process, one of which runs the ordinary model. The peer compares whole images.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.case import Case, case_of
from zmqtrain.data.batch import Batch
from zmqtrain.parallel import parallelize
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import Choice, LayerPlan, Plan
from zmqtrain.parallel.verify import Case as Comparison
from zmqtrain.parallel.verify import Verified, verified
from zmqtrain.parallel.verify.case import alone
from zmqtrain.parallel.verify.verdict import PlainShare
from zmqtrain.testing.threads import run_ranks

SAMPLES, CLASSES = 4, 1000
#: Of a ResNet: blocks of each stage.
RESNET50 = (3, 4, 6, 3)


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.layers = nn.Sequential(
            *_layer(before, width, 1), nn.ReLU(), *_layer(width, width, 3, stride), nn.ReLU(), *_layer(width, after, 1)
        )
        self.project = nn.Sequential(*_layer(before, after, 1, stride)) if before != after or stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layers(x) + self.project(x))


def _layer(before: int, after: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(after)


def resnet(blocks: Sequence[int] = RESNET50, width: int = 64) -> nn.Module:
    """ResNet-50, or one of other blocks and widths."""
    layers: list[nn.Module] = [*_layer(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(Bottleneck(before, width << stage, 2 if stage and not number else 1))
            before = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def bench_verified(make: Callable[[], nn.Module] = resnet, side: int = 224) -> Iterator[Case]:
    """A case for each way to divide the convolutions."""
    torch.manual_seed(1)
    model = make()
    choices: tuple[Choice, ...] = ("model", "domain", "batch")
    for choice in choices:
        found, seconds = compared(model, choice, side, smaller=True)
        _, whole = compared(model, choice, side, smaller=False)
        what = f"2x2, {choice}, images of {side}x{side}, of which {found.images or 'all'}"
        yield case_of("verified", what, seconds, "s of CPU", "whole images", whole, digits=3)


def compared(model: nn.Module, choice: Choice, side: int, *, smaller: bool) -> tuple[Verified, float]:
    """Compare, and say how long the processor took, all ranks together."""
    grid = Grid(2, 2)
    kinds = (nn.Conv2d, nn.Linear)
    chosen: dict[type[nn.Module], Choice] = {nn.Conv2d: choice, nn.Linear: "batch" if choice == "batch" else "model"}
    plan = Plan(tuple(LayerPlan(name, chosen[type(each)], grid) for name, each in model.named_modules() if isinstance(each, kinds)))
    batch = Batch((torch.randn(SAMPLES, 3, side, side),), torch.arange(SAMPLES), SAMPLES)

    def on_rank(fabric: Fabric) -> Verified:
        torch.set_num_threads(1)  # it is each thread's

        def copied() -> nn.Module:
            with alone():
                return copy.deepcopy(model)

        case = Comparison(
            make=lambda: copy.deepcopy(model),
            divide=lambda: parallelize(copied(), grid, plan, fabric=fabric),
            batch=batch,
            loss=functional.cross_entropy,
            optimizer=lambda any_model: torch.optim.AdamW(any_model.parameters()),
            share=PlainShare,
            seed=1,
            local_statistics=False,
            dtype=torch.float64,
            smaller=smaller,
        )
        return verified(case, fabric)

    began = time.process_time()
    results, _ = run_ranks(grid.size, on_rank, timeout_s=None)
    return results[0], time.process_time() - began
