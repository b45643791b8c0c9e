"""What plans are priced at is what ranks in threads then count: by layer, term and phase, of the rank that sends most."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.pairwise import pairwise
from tests.parallel.placed.models import Transformer, alexnet, images, words
from tests.parallel.placed.test_pairs import WIDTH, Attention, Mlp
from tests.parallel.placed.test_parallelize import divided
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.traffic import Sent
from zmqtrain.parallel.modelled import without_content
from zmqtrain.parallel.plan import Choice, LayerPlan, Plan
from zmqtrain.parallel.rehearsal import rehearse
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.plan.counted import counted, predicted
from zmqtrain.plan.layers import Stage, stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import Problem, placed_of
from zmqtrain.plan.trace import trace_layers
from zmqtrain.testing.threads import ThreadFabric, run_ranks

BATCH = 8
LINK = Link(200e-6, 8e-9)
WORD_BYTES = 8  # float64


class Block(nn.Module):
    """A residual block whose layers are all modules, which is what the planner sees."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after)
        self.second, self.norm2 = nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)
        self.project = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(self.relu(self.norm1(self.first(x)))))
        return self.relu(y + self.project(x))  # type: ignore[no-any-return]


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks = [Block(4, 4, 1), Block(4, 8, 2), Block(8, 8, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 4), (4, 8), (8, 6)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 4 * 4, 10), nn.ReLU(), nn.Dropout(), nn.Linear(10, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "alexnet": (alexnet, images(95)),
    "resnet": (resnet, images(32)),
    "vgg": (vgg, images(32)),
    "transformer": (Transformer, words),
}
CHAINS = ("alexnet", "vgg")
#: Of a layer with images, and of the others; on which grid.
PLANS: dict[str, tuple[tuple[Choice, str], tuple[Choice, str]]] = {
    "pure batch": (("batch", "1x4"), ("batch", "1x4")),
    "pure model": (("model", "4x1"), ("model", "4x1")),
    "model on a square": (("model", "2x2"), ("model", "2x2")),
    "domain, then model": (("domain", "4x1"), ("model", "4x1")),
    "batch, then model": (("batch", "2x2"), ("model", "2x2")),
    "two grids": (("model", "2x2"), ("model", "4x1")),
    "domain, then model on another grid": (("domain", "2x2"), ("model", "4x1")),
    "whole": (("whole", "4x1"), ("whole", "4x1")),
    "whole on a square": (("whole", "2x2"), ("whole", "2x2")),
    "whole, then model": (("whole", "4x1"), ("model", "4x1")),
    "domain, then whole": (("domain", "4x1"), ("whole", "4x1")),
    "width, then model": (("domain", "2x2 width"), ("model", "4x1")),
    "squares, then model": (("domain", "4x1 2x2"), ("model", "4x1")),
}


def plan_of(layers: Sequence[Stage], how: str) -> Plan:
    """All stages that take images one way, and all others another."""
    found = []
    for stage in layers:
        choice, where = PLANS[how][0 if stage.head.image else 1]
        grid, *strips = where.split()
        found.append(LayerPlan(stage.name, choice, Grid.parse(grid), *strips))
    return Plan(tuple(found))


#: The transformer has no layers that take images: of plans that differ in these alone, it has the first. AlexNet and VGG are both
#: chains of layers: they have the plans by turns.
CASES = [
    (name, how)
    for name in MODELS
    for number, how in enumerate(PLANS)
    if (name != "transformer" or how == next(each for each in PLANS if PLANS[each][1] == PLANS[how][1]))
    and (name not in CHAINS or number % len(CHAINS) == CHAINS.index(name))
]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_what_a_plan_is_priced_at_is_what_is_sent(name: str, how: str) -> None:
    x = MODELS[name][1](BATCH).to("meta")
    layers = stages(trace_layers(MODELS[name][0]().double(), [x]))
    plan = plan_of(layers, how)
    problem = Problem(layers, BATCH, 4, LINK, Ours(WORD_BYTES))
    found = price(problem, placed_of(problem, plan))

    def step(fabric: ThreadFabric) -> None:
        model = divided(without_content(MODELS[name][0]().double()), Grid(2, 2), plan, fabric)
        fabric.traffic.messages.clear()  # of the meeting after the tracing
        fabric.traffic.nbytes.clear()
        model.batch.size = BATCH
        model(x[slice(*model.samples(BATCH))]).sum().backward()
        sum_gradients(model, fabric, model.shards_by_name())

    _, world = run_ranks(4, step)
    ranks = [{label: Sent(each.messages[label], each.nbytes[label]) for label in each.messages} for each in world.traffic]
    sent = counted(layers, ranks)
    assert sent == predicted(found)
    alike = all(layer.placed == Placed("whole", Grid(4, 1)) for layer in found.layers)  # all compute the same on the same samples
    assert {term for _, term, _ in sent} == {"dw"} if alike else sent


@pytest.mark.parametrize(
    "ways",
    [
        ("batch 1x4", "whole 4x1"),
        ("batch 1x4", "whole 2x2", "whole 4x1"),
        ("domain 4x1", "batch 1x4", "whole 4x1"),
        ("model 4x1", "batch 1x4", "model 4x1", "domain 2x2", "batch 1x4"),
    ],
)
def test_residual_blocks_whose_branches_lie_in_different_ways(ways: Sequence[str]) -> None:
    """What is brought to where a branch ends is priced as it is sent, also a block's own input."""
    x = images(32)(BATCH).to("meta")
    with torch.device("meta"):
        model = resnet().double()
    layers = stages(trace_layers(model, [x]))
    choices = [*(ways[number % len(ways)].split() for number in range(len(layers) - 1)), ["batch", "1x4"]]
    plan = Plan(tuple(LayerPlan(stage.name, how, Grid.parse(grid)) for stage, (how, grid) in zip(layers, choices, strict=True)))  # type: ignore[arg-type]
    problem = Problem(layers, BATCH, 4, LINK, Ours(WORD_BYTES))
    priced = price(problem, placed_of(problem, plan))
    assert counted(layers, rehearse(model, [x], Grid(1, 4), plan, BATCH)) == predicted(priced)
    assert any(each.charged for each in problem.graph.brought)


#: Of 8 processes: with several rows, or several columns, or both.
EIGHT = ["batch 1x8", "model 2x4", "model 4x2", "model 8x1", "domain 2x4", "domain 4x2"]


@pairwise({"first": EIGHT, "second": EIGHT, "third": EIGHT})
def test_between_grids_of_several_rows_and_columns(first: str, second: str, third: str) -> None:
    """Parts nest but for strips: half of an image that a process has may not be the half of which it needs a quarter."""
    with torch.device("meta"):
        x = torch.empty(16, 3, 8, 8, dtype=torch.float64)
        convolutions = [nn.Conv2d(inputs, 16, 3, padding=1) for inputs in (3, 16, 16)]
        model = nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1], nn.ReLU(), convolutions[2]).double()
    layers = stages(trace_layers(model, [x]))
    choices = [each.split() for each in (first, second, third)]
    plan = Plan(tuple(LayerPlan(stage.name, how, Grid.parse(grid)) for stage, (how, grid) in zip(layers, choices, strict=True)))  # type: ignore[arg-type]
    problem = Problem(layers, 16, 8, LINK, Ours(WORD_BYTES))
    priced = price(problem, placed_of(problem, plan))
    assert counted(layers, rehearse(model, [x], plan.layers[0].grid, plan, 16)) == predicted(priced)


class EncoderLayer(nn.Module):
    """A transformer's layer of linear layers: a half costs a sum in forward, and in backward one for each layer that begins it."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp(gated=gated)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["model 4x1", "model 2x2", "whole 2x2", "batch 1x4"])
def test_attention_and_mlps_of_linear_layers(how: str) -> None:
    with torch.device("meta"):
        layers = EncoderLayer(gated=False), EncoderLayer(gated=True)
        model = nn.Sequential(nn.Embedding(11, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)).double()
        x = torch.zeros(BATCH, 6, dtype=torch.long)
    found = stages(trace_layers(model, [x]))
    choice, grid = how.split()
    plan = Plan(tuple(LayerPlan(stage.name, choice, Grid.parse(grid)) for stage in found))  # type: ignore[arg-type]
    problem = Problem(found, BATCH, 4, LINK, Ours(WORD_BYTES))
    priced = price(problem, placed_of(problem, plan))
    assert counted(found, rehearse(model, [x], Grid.parse(grid), plan, BATCH)) == predicted(priced)
    sums = [layer for layer in priced.layers if layer.stage.head.by_inputs]
    assert [layer.stage.name for layer in sums] == (
        ["1.attention.out_proj", "1.mlp.down_proj", "2.attention.out_proj", "2.mlp.down_proj"] if choice == "model" else []
    )
    assert all(layer.cost.dx.messages == 0 < layer.cost.all_gather.messages for layer in sums)


@pytest.mark.parametrize("ways", [("batch 1x4", "model 4x1"), ("whole 4x1", "model 2x2", "batch 1x4"), ("model 4x1", "whole 2x2")])
def test_transformer_layers_that_lie_in_different_ways(ways: Sequence[str]) -> None:
    """A layer that is planned as one moves its input once, and the sums within it lie where it does."""
    with torch.device("meta"):
        layers = [nn.TransformerEncoderLayer(16, 4, 32, batch_first=True) for _ in range(3)]
        model = nn.Sequential(nn.Embedding(11, 16), *layers, nn.Linear(16, 8)).double()
        x = torch.zeros(BATCH, 6, dtype=torch.long)
    found = stages(trace_layers(model, [x]))
    choices = [ways[number % len(ways)].split() for number in range(len(found))]
    plan = Plan(tuple(LayerPlan(stage.name, how, Grid.parse(grid)) for stage, (how, grid) in zip(found, choices, strict=True)))  # type: ignore[arg-type]
    problem = Problem(found, BATCH, 4, LINK, Ours(WORD_BYTES))
    priced = price(problem, placed_of(problem, plan))
    assert counted(found, rehearse(model, [x], plan.layers[0].grid, plan, BATCH)) == predicted(priced)
