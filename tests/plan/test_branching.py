"""Models that branch: which layer takes whose output, and the best plan against all plans there are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.plan.networks import LINK, conv, linear
from tests.plan.test_planner import brute_force
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.paired import Paired
from zmqtrain.plan import branching
from zmqtrain.plan.costs import Paper
from zmqtrain.plan.graph import Brought, Graph, graph_of
from zmqtrain.plan.layers import INPUT, Branch, LayerShape, Meeting, Pair, Stage, stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.planner import plan
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import Problem
from zmqtrain.plan.trace import trace_layers


def identity() -> tuple[Stage, ...]:
    """A block whose input is added to its output, and a connected layer."""
    added = Meeting((Branch("c", 512), Branch("a", 512)), "block")
    layers = [conv("a", 3, 8, 8), conv("b", 8, 8, 8), conv("c", 8, 8, 8), replace(linear("d", 512, 64), source=added)]
    return stages(layers)


def projected() -> tuple[Stage, ...]:
    """A block with a shortcut of its own layer, and another one that begins where it ends."""
    first = Meeting((Branch("b", 512), Branch("shortcut", 512)), "one")
    second = Meeting((Branch("c", 512), Branch(first, 512)), "two")
    return stages(
        [
            conv("a", 3, 8, 8),
            conv("b", 8, 8, 8),
            replace(conv("shortcut", 8, 8, 8, 1), source="a"),
            replace(conv("c", 8, 8, 8), source=first),
            replace(linear("d", 512, 10), source=second),
        ]
    )


PRICINGS = {"paper": Paper(), "ours": Ours(), "hosts of two": Ours(per_host=2)}
#: Overlap, speed, and link.
MACHINES: dict[str, tuple[float, float, Link]] = {
    "none": (0.0, 1e9, Link(1e-7, 1e-8, 1e-10)),
    "all": (1.0, 1e10, Link(1e-4, 1e-9, 1e-10)),
    "some": (0.6, 1e8, LINK),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("pricing", PRICINGS)
def test_the_same_optimum_as_brute_force(pricing: str, machine: str) -> None:
    """Every pricing on every machine. The model with more plans meets each of these once, and that of all 1,715 plans of four
    processes is tried once."""
    which = (list(PRICINGS).index(pricing) - list(MACHINES).index(machine)) % 3
    make, processes = (projected, 2) if which == 1 else (identity, 2)
    if (pricing, machine) == ("ours", "some"):
        make, processes = identity, 4
    overlap, flops, link = MACHINES[machine]
    problem = Problem(tuple(make()), 12, processes, link, PRICINGS[pricing], overlap, flops)
    expected = brute_force(problem)
    assert expected is not None
    assert plan(problem).price.step_s == pytest.approx(expected.step_s, rel=1e-12)


@pytest.mark.parametrize(("tight", "processes"), [(0.1, 4), (0.5, 2)])
def test_within_memory(tight: float, processes: int) -> None:
    problem = Problem(identity(), 16, processes, LINK, Ours(), 1.0, 1e9)
    each = [[problem.memory(stage, how).total for how in problem.options(stage).placed] for stage in problem.layers]
    least, most = (sum(function(row) for row in each) for function in (min, max))
    problem = replace(problem, memory_bytes=least + tight * (most - least) + 1)
    found, expected = plan(problem), brute_force(problem)
    assert expected is not None
    assert found.price.step_s == pytest.approx(expected.step_s, rel=1e-12)
    assert found.price.memory.total <= problem.memory_bytes


def test_more_paths_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(projected(), 16, 4, LINK, Ours(), 1.0, 1e9)
    best = plan(problem).price.step_s
    monkeypatch.setattr(branching, "MOST_KEPT", 4)
    assert best <= plan(problem).price.step_s < 1.5 * best


def test_a_graph() -> None:
    found = graph_of(projected())
    brought = Brought(2, 1, 512, 2), Brought(1, 3, 512, 3)
    assert found == Graph((None, 0, 0, 1, 3), brought, (("one", 2), ("two", 3)))
    assert (found.chain, found.after(0), found.ends(4), found.ends(2)) == (False, [1, 2], True, False)
    assert graph_of(stages((conv("a", 3, 8, 8), linear("b", 512, 5)))).chain


def test_pairs_are_divided_together_or_not_at_all() -> None:
    """Of the plans whose pairs are so the best is found; and what is divided alone costs more."""
    first, last = (Pair("b", Paired(by, 64, 1, 64)) for by in ("outputs", "inputs"))  # type: ignore[arg-type]
    layers = [replace(linear("a", 32, 64), pair=first), replace(linear("b", 64, 32), pair=last), linear("c", 32, 16)]
    problem = Problem(stages(layers), 64, 4, LINK, Ours(), 1.0, 1e8)
    assert not problem.graph.chain
    assert problem.graph.mates(0) == problem.graph.mates(1) == (0, 1)
    every = itertools.product(*(problem.options(stage).placed for stage in problem.layers))
    alike = [placed for placed in every if placed[0] == placed[1] or "model" not in {placed[0].choice, placed[1].choice}]
    found = plan(problem).price.step_s
    assert found == pytest.approx(min(price(problem, placed).step_s for placed in alike), rel=1e-12)
    together = price(problem, [Placed("model", Grid(4, 1))] * 3)
    apart = price(problem, [Placed("model", Grid(4, 1)), Placed("model", Grid(2, 2)), Placed("model", Grid(4, 1))])
    assert [layer.stage.head.by_inputs for layer in together.layers] == [False, True, False]
    assert not any(layer.stage.head.by_inputs for layer in apart.layers)
    paper = replace(problem, pricing=Paper())
    assert not any(layer.stage.head.by_inputs for layer in price(paper, [Placed("model", Grid(4, 1))] * 3).layers)


class Parts(nn.Module):
    """Branches that meet in functions, a layer without weights that is called twice, and a second input's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.relu, self.other = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Linear(5, 4)
        self.left, self.right = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        x = self.relu(self.left(x) + torch.tanh(self.right(x)))
        return self.head(self.pool(x).flatten(1) * self.other(y))  # type: ignore[no-any-return]


def test_branches_are_traced_through_functions() -> None:
    found = stages(trace_layers(Parts(), [torch.zeros(2, 3, 8, 8), torch.zeros(2, 5)]))
    added = Meeting((Branch("left", 256), Branch("right", 256)))
    sources = {stage.name: stage.source for stage in found}
    assert sources == {
        "stem": None, "left": None, "right": "stem", "other": INPUT, "head": Meeting((Branch(added, 4), Branch("other", 4)))
    }  # fmt: skip
    followers = {stage.name: [each.name for each in stage.followers] for stage in found}
    assert followers == {"stem": ["relu"], "left": ["pool"], "right": [], "other": [], "head": []}
    assert [stage.head.name for stage in found if graph_of(found).before[found.index(stage)] is None] == ["stem", "other"]


def test_what_is_not_known_is_the_input() -> None:
    assert graph_of(identity()[1:]).before == (None, 0, 1)
    assert isinstance(stages([LayerShape("a", "linear", (1,), (1,), 1, source=INPUT)])[0].source, type(None))
