"""Trains a model in one process and divided over ranks that are threads, and compares all that a person could see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.model import ParallelModel, parallelize, step_seed
from zmqtrain.parallel.plan import Choice, LayerPlan, Plan
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.testing.threads import run_ranks

SEED, CLASSES = 5, 5
#: Choices for convolutions, one after another, and for other layers.
PLANS: dict[str, tuple[tuple[Choice, ...], tuple[Choice, ...]]] = {
    "model": (("model",), ("model",)),
    "domain": (("domain",), ("model",)),
    "batch": (("batch",), ("batch",)),
    "width": (("domain",), ("model",)),
    "both": (("domain",), ("model",)),
    "mixed": (("model", "domain", "domain", "whole", "batch"), ("whole", "model", "batch")),
}
#: How images are divided, by plan and rows of the grid.
STRIPS = {"width": dict.fromkeys(range(1, 7), "width"), "both": {4: "2x2", 6: "3x2"}}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
OTHERS = (nn.Linear, nn.MultiheadAttention)


def plan_of(model: nn.Module, grid: Grid, plan: str) -> Plan:
    """Every layer of a model, with the choices in turn."""
    convolutions, others = PLANS[plan]
    counts, layers = {True: 0, False: 0}, []
    for name, module in model.named_modules():
        image = isinstance(module, CONVOLUTIONS)
        if image or (isinstance(module, OTHERS) and not name.endswith("out_proj")):
            choices = convolutions if image else others
            choice = choices[counts[image] % len(choices)]
            strips = STRIPS[plan].get(grid.rows, "height") if choice == "domain" and plan in STRIPS else "height"
            layers.append(LayerPlan(name, choice, grid, strips))
            counts[image] += 1
    return Plan(tuple(layers))


@dataclass
class Training:
    """How a model is trained. Inputs have samples along their first dimension; losses are sums over samples."""

    inputs: Any
    """A tensor, or tensors by name, which a model takes as one dictionary."""
    steps: int = 2
    pieces: int = 1
    """Forwards and backwards of a step, each with the same samples."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around each forward."""
    rate: float = 0.01
    relative: float = 1e-9
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `parallelize`."""

    @property
    def batch(self) -> int:
        return len(self.inputs if isinstance(self.inputs, Tensor) else next(iter(self.inputs.values())))

    def given(self, start: int, stop: int) -> Any:
        """These samples."""
        if isinstance(self.inputs, Tensor):
            return self.inputs[start:stop]
        return {name: each[start:stop] for name, each in self.inputs.items()}

    def loss(self, output: Any, own: slice) -> Tensor:
        """The part of these samples in the mean of all."""
        targets = torch.randint(CLASSES, (self.batch,), generator=torch.Generator().manual_seed(4))[own]
        parts = [
            weight * nn.functional.cross_entropy(each, targets, reduction="sum", label_smoothing=0.1)
            for weight, each in outputs_of(output)
        ]
        return torch.stack(parts).sum() / self.batch

    def alone(self, model: nn.Module) -> dict[str, Any]:
        """One process with all samples."""
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate, momentum=0.9)
        found: dict[str, Any] = {"losses": []}
        for step in range(self.steps):
            optimizer.zero_grad()
            for _ in range(self.pieces):
                torch.manual_seed(step_seed(SEED, step))
                with self.around():
                    output = model(self.given(0, self.batch))
                loss = self.loss(output, slice(0, self.batch))
                loss.backward()
            found.setdefault("gradients", gradients_of(model))
            optimizer.step()
            found["losses"].append(loss.item())
        model.eval()
        with torch.no_grad(), self.around():
            found["eval"] = model(self.given(0, self.batch))
        return found | {"state": dict(model.state_dict())}

    def divided(self, model: nn.Module, fabric: Fabric, grid: Grid, plan: Plan) -> dict[str, Any]:
        """This process's part of the same."""
        parallel: ParallelModel = parallelize(model, grid, plan, fabric=fabric, seed=SEED, **self.settings)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=self.rate, momentum=0.9)
        parallel.batch.size = self.batch
        start, stop = parallel.samples(self.batch)
        found: dict[str, Any] = {"losses": []}
        shards = parallel.shards_by_name()

        def own() -> slice:
            part = parallel.output_range()
            return slice(start + part.start, start + part.stop)

        for step in range(self.steps):
            parallel.batch.step = step
            optimizer.zero_grad()
            for _ in range(self.pieces):
                with self.around():
                    output = parallel(self.given(start, stop))
                loss = self.loss(output, own())
                loss.backward()
            sum_gradients(parallel, fabric, shards)
            found.setdefault("gradients", gradients_of(parallel))
            optimizer.step()
            found["losses"].append(loss.item() / parallel.output_placement.copies)
        parallel.eval()
        with torch.no_grad(), self.around():
            found["eval"] = parallel(self.given(start, stop))
        found |= {"own": own(), "shards": shards, "left_whole": dict(parallel.left_whole)}
        return found | {"state": parallel.whole_state()}


@dataclass
class OfNumbers(Training):
    """The same for outputs of any shape, of which every element counts, and losses that models compute themselves."""

    rate: float = 0.05

    def loss(self, output: Any, own: slice) -> Tensor:
        part = (own.stop - own.start) / self.batch
        total = torch.zeros((), dtype=torch.float64)
        for weight, each in outputs_of(output):
            if each.is_floating_point() and (own.stop > own.start or not each.dim()):
                values = each.flatten(1) if each.dim() > 1 else each.reshape(-1, 1)
                ways = torch.cos(torch.arange(values.shape[1], dtype=values.dtype) + 1)
                total = total + weight * ((values * ways).sum(1) + 0.1 * values.square().sum(1)).mean() * part
            else:
                total = total + each.sum() * 0  # others have all of them, and wait for this process's backward
        return total


def outputs_of(output: Any) -> Iterator[tuple[float, Tensor]]:
    """What counts in the loss, and how much."""
    if isinstance(output, Tensor):
        yield 1.0, output
        return
    yield from ((1.0 if not number else 0.3, each) for number, each in enumerate(output) if each is not None)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By the parameters' names, of those with elements."""
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: each for name, each in found.items() if each.numel()}


def close(found: Tensor, expected: Tensor, relative: float, scale: float, what: str) -> None:
    """Equal but for a part of the largest element, or for rounding where that is next to nothing beside ``scale``."""
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    if not expected.numel():
        return
    error = (found.double() - expected.double()).abs().max().item()
    bound = relative * expected.double().abs().max().item() + relative / 1000 * scale
    assert error <= bound, f"{what}: {error:.3g} apart, {bound:.3g} allowed"


def compare(make: Callable[[], nn.Module], training: Training, plan: str | Plan, grid: str) -> dict[str, str]:
    """A model by a plan on a grid is the model: losses, gradients, state after steps, and outputs in eval mode.

    ``make`` gives it the same weights each time. Returns what was left whole.
    """
    wanted, relative = Grid.parse(grid), training.relative
    model, *copies = (make() for _ in range(1 + wanted.size))  # some cannot be copied: layers with the old weight_norm
    layers = plan_of(model, wanted, plan) if isinstance(plan, str) else plan
    expected = training.alone(model)
    results, _ = run_ranks(wanted.size, lambda fabric: training.divided(copies[fabric.rank], fabric, wanted, layers))
    for step, loss in enumerate(expected["losses"]):
        assert sum(found["losses"][step] for found in results) == pytest.approx(loss, rel=relative), f"loss of step {step}"
    largest = max(each.abs().max().item() for each in expected["gradients"].values())
    for rank, found in enumerate(results):
        assert found["gradients"].keys() <= expected["gradients"].keys()
        for key, gradient in expected["gradients"].items():
            shard = found["shards"][key]
            if 0 in shard.local_shape(shard.members.index(rank)):
                continue
            part = shard.cut(gradient, shard.members.index(rank))
            close(found["gradients"][key], part, relative, largest, f"gradient of {key} at rank {rank}")
        assert found["state"].keys() == expected["state"].keys()
        for key, value in expected["state"].items():
            close(found["state"][key], value, relative, 1.0, f"{key} after {training.steps} steps at rank {rank}")
        for (_, one), (_, other) in zip(outputs_of(found["eval"]), outputs_of(expected["eval"]), strict=True):
            own = other[found["own"]] if other.dim() else other
            close(one, own, relative, other.abs().max().item(), f"output of rank {rank}")
    return results[0]["left_whole"]  # type: ignore[no-any-return]
