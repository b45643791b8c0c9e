"""Divided models are the models: outputs, gradients, weights after steps, and state, on every grid and by every plan."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.placed.models import MODELS, made
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.modelled import without_content
from zmqtrain.parallel.placed.model import ParallelModel, parallelize
from zmqtrain.parallel.plan import Choice, LayerPlan, Plan
from zmqtrain.parallel.rehearsal import RehearsalFabric, train_step
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.testing.threads import run_ranks

BATCH = 7
STEPS = 2
RANDOM = ("alexnet", "transformer", "lstm")
GRIDS = ["1x1", "2x1", "1x2", "2x2", "1x3", "3x1", "4x1", "2x3"]
FEWER = ["2x1", "2x2", "3x1", "2x3"]


def targets() -> Tensor:
    return torch.randint(5, (BATCH,), generator=torch.Generator().manual_seed(4))


def train(model: nn.Module, x: Tensor, fabric: Fabric, *, steps: int = STEPS) -> list[float]:
    """The losses of this process's samples, as parts of the whole batch's mean."""
    assert isinstance(model, ParallelModel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.batch.size = len(x)
    start, stop = model.samples(len(x))
    losses = []
    for step in range(steps):
        model.batch.step = step
        optimizer.zero_grad()
        output = model(x[start:stop])
        mine = model.output_range()
        loss = nn.functional.cross_entropy(output, targets()[start:stop][mine], reduction="sum") / len(x)
        loss.backward()
        sum_gradients(model, fabric, model.shards_by_name())
        optimizer.step()
        losses.append(loss.item() / model.output_placement.copies)
    return losses


def plan_of(model: nn.Module, grid: Grid, convolutions: Choice, others: Choice) -> Plan:
    layers = [
        LayerPlan(name, convolutions if isinstance(module, nn.Conv2d) else others, grid)
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear | nn.Embedding | nn.LSTM | nn.TransformerEncoderLayer)
        and ".self_attn" not in name
        and ".linear" not in name
    ]
    return Plan(tuple(layers))


def divided(model: nn.Module, grid: Grid, plan: Plan | None, fabric: Fabric, **settings: Any) -> ParallelModel:
    return parallelize(model, grid, plan, fabric=fabric, seed=5, **settings)


@pytest.mark.parametrize("name", ["resnet", "transformer", "lstm"])
def test_a_model_that_is_needed_no_more_is_freed(name: str) -> None:
    """Cycles of references that lead through autograd's graph are not found by Python."""
    model, (_, data) = made(name), MODELS[name]
    first = weakref.ref(next(model.parameters()))
    fabric = RehearsalFabric(0, 2)
    parallel = divided(without_content(model), Grid(2, 1), None, fabric)
    copied = weakref.ref(next(parallel.parameters()))
    parallel.batch.size = BATCH
    train_step(parallel, [data(2).to("meta")])
    del model, parallel
    gc.collect()
    assert (first(), copied()) == (None, None)


def reference(name: str, x: Tensor, *, dropout: bool) -> tuple[list[float], dict[str, Tensor]]:
    """One process on the whole batch."""

    def run(fabric: Fabric) -> Any:
        model = divided(made(name, dropout=dropout), Grid(1, 1), None, fabric)
        return train(model, x, fabric), model.whole_state()

    if dropout and name in RANDOM:
        results, _ = run_ranks(1, run)
        return results[0]  # type: ignore[no-any-return]
    model = made(name, dropout=dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), targets())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def trains_as_one_process(name: str, layers_of: Callable[[nn.Module], list[LayerPlan]]) -> None:
    """Four processes whose main grid is 1x4, and whose layers are divided as ``layers_of(model)`` says."""
    x = MODELS[name][1](BATCH)
    losses, state = reference(name, x, dropout=False)

    def run(fabric: Fabric) -> Any:
        model = made(name)
        parallel = divided(model, Grid(1, 4), Plan(tuple(layers_of(model))), fabric)
        found = train(parallel, x, fabric)
        return found, parallel.whole_state()

    results, _ = run_ranks(4, run)
    assert sum(found[-1] for found, _ in results) == pytest.approx(losses[-1], rel=1e-10)
    for _, found in results:
        for key, value in state.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("images", "others"),
    [(("whole", "4x1"), ("model", "2x2")), (("model", "2x2"), ("whole", "4x1")), (("whole", "4x1"), ("whole", "4x1")),
     (("whole", "2x2"), ("batch", "1x4")), (("domain", "4x1"), ("whole", "2x2"))],
)  # fmt: skip
def test_whole_layers_on_another_grid(images: tuple[Choice, str], others: tuple[Choice, str]) -> None:
    """Their gradients are summed over those who have other samples, which the main grid's rows are not."""

    def layers(model: nn.Module) -> list[LayerPlan]:
        return [
            LayerPlan(name, choice, Grid.parse(grid))
            for name, module in model.named_modules()
            if isinstance(module, nn.Conv2d | nn.Linear)
            for choice, grid in [images if isinstance(module, nn.Conv2d) else others]
        ]

    trains_as_one_process("vgg", layers)


@pytest.mark.parametrize(
    "ways", [("whole 4x1", "batch 1x4"), ("model 2x2", "domain 4x1", "batch 1x4"), ("domain 2x2", "whole 4x1")]
)
def test_branches_that_lie_in_different_ways(ways: tuple[str, ...]) -> None:
    """What is added to a block's output is brought to where that lies."""

    def layers(model: nn.Module) -> list[LayerPlan]:
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
        choices = [ways[number % len(ways)].split() for number in range(len(names) - 1)] + [["batch", "1x4"]]
        return [LayerPlan(name, choice, Grid.parse(grid)) for name, (choice, grid) in zip(names, choices, strict=True)]  # type: ignore[arg-type]

    trains_as_one_process("resnet", layers)


CASES = [
    # Each model on every second grid, and each grid with every second model; so the other choices, where there are two models.
    *((name, "model", "model", grid) for number, name in enumerate(MODELS) for grid in GRIDS[number % 2 :: 2]),
    *(
        (name, "domain", "model", grid)
        for number, name in enumerate(("alexnet", "resnet", "vgg"))
        for grid in FEWER[number % 2 :: 2]
    ),
    *((name, "batch", "model", grid) for turn, name in enumerate(("alexnet", "resnet")) for grid in FEWER[turn::2]),
    *(("resnet", "domain", "whole", grid) for grid in FEWER[1:]),
    *((name, "batch", "batch", grid) for turn, name in enumerate(("vgg", "transformer")) for grid in FEWER[turn::2]),
    *(("lstm", "whole", "whole", grid) for grid in FEWER[::2]),
]


@pytest.mark.parametrize(("name", "convolutions", "others", "grid"), CASES)
def test_training_equals_one_process(name: str, convolutions: Choice, others: Choice, grid: str) -> None:
    x = MODELS[name][1](BATCH)
    # Within torch's own recurrent and attention layers masks are the same on every grid only where they are model-parallel.
    dropout = name == "alexnet" or others == "model"
    losses, state = reference(name, x, dropout=dropout)
    wanted = Grid.parse(grid)

    def run(fabric: Fabric) -> Any:
        model = made(name, dropout=dropout)
        parallel = divided(model, wanted, plan_of(model, wanted, convolutions, others), fabric)
        found = train(parallel, x, fabric)
        return found, parallel.whole_state(), parallel.left_whole

    results, _ = run_ranks(wanted.size, run)
    for step, loss in enumerate(losses):
        assert sum(found[step] for found, _, _ in results) == pytest.approx(loss, rel=1e-10)
    for _, found, left_whole in results:
        assert not {layer for layer in left_whole if "groups" not in left_whole[layer]}, left_whole
        assert found.keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("choice", ["batch", "domain", "whole"])
def test_gradients_are_complete_as_soon_as_the_layer_has_them(choice: Choice) -> None:
    """So that sums of weight gradients travel while the layers before are computed."""
    grid = Grid(2, 1)
    names = [str(number) for number in range(3)]
    model = without_content(nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in names)))
    plan = Plan(tuple(LayerPlan(name, choice, grid) for name in names))
    found: list[str] = []

    def watch(name: str, layer: nn.Module) -> None:
        def called(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda _: found.append(name))  # type: ignore[no-untyped-call]

        layer.register_forward_hook(called)

    for name, layer in model.named_children():
        watch(name, layer)
    parallel = parallelize(model, grid, plan, fabric=RehearsalFabric(0, grid.size))
    for name, parameter in parallel.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: found.append(name))  # type: ignore[misc]
    parallel.batch.size = 4
    train_step(parallel, [torch.empty(2, 4, 8, 8)])
    assert max(found.index("2.weight"), found.index("2.bias")) < found.index("0")  # the gradient of what layer 1 has taken
    assert max(found.index("1.weight"), found.index("1.bias")) < min(found.index("0.weight"), found.index("0.bias"))


@pytest.mark.parametrize("last", [nn.Identity(), nn.Tanh()])
def test_gradients_of_gradients_are_refused(last: nn.Module) -> None:
    """Also where nothing but the weights depends on them."""

    def run(fabric: Fabric) -> None:
        parallel = parallelize(nn.Sequential(nn.Linear(4, 6), last), "2x1", fabric=fabric)
        parallel.batch.size = 2
        x = torch.ones(2, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(parallel(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"a gradient of a gradient .* goes through a divided model"):
            gradient.square().sum().backward()

    run_ranks(2, run)
