"""What a rehearsal predicts is what ranks in threads then count: by rank, layer, term and phase, in messages and in bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parallel.placed.models import MODELS, made
from tests.parallel.placed.test_parallelize import BATCH, divided, plan_of, train
from zmqtrain.parallel.communicator import Expected, Fabric, Label
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import Choice, LayerPlan, Plan
from zmqtrain.parallel.rehearsal import RehearsalFabric, rehearse
from zmqtrain.testing.threads import ThreadFabric, run_ranks


def mixed(model: nn.Module) -> Plan:
    """Every other layer on another grid, domain- and model-parallel by turns."""
    layers = list(plan_of(model, Grid(2, 2), "domain", "model"))
    return Plan(
        tuple(
            LayerPlan(
                each.layer,
                "model" if number % 3 == 2 else each.choice,
                Grid(4, 1) if number % 2 else Grid(2, 2),
            )
            for number, each in enumerate(layers)
        )
    )


#: Name -> the convolutions' and the others' choice, and the grid.
PLANS: dict[str, tuple[Choice, Choice, str]] = {
    "pure batch": ("batch", "batch", "1x4"),
    "pure model": ("model", "model", "3x1"),
    "domain, then model": ("domain", "model", "4x1"),
    "batch, then model": ("batch", "model", "2x2"),
}
#: AlexNet and VGG are both chains of layers: they have the plans by turns.
CASES = [
    (name, how)
    for number, how in enumerate((*PLANS, "mixed grids"))
    for name in (("alexnet", "vgg")[number % 2], "resnet", "transformer")
]


@pytest.mark.parametrize(("name", "how"), [*CASES, ("lstm", "pure model")])
def test_what_is_predicted_is_what_is_counted(name: str, how: str) -> None:
    x = MODELS[name][1](BATCH)

    def planned(model: nn.Module) -> tuple[Grid, Plan]:
        if how == "mixed grids":
            return Grid(2, 2), mixed(model)
        convolutions, others, text = PLANS[how]
        return (grid := Grid.parse(text)), plan_of(model, grid, convolutions, others)

    model = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    grid, plan = planned(model)
    predicted = rehearse(model, [x[:2]], grid, plan, BATCH)
    torch.testing.assert_close(model.state_dict(), before)

    def run(fabric: ThreadFabric) -> None:
        mine = made(name)
        parallel = divided(mine, grid, planned(mine)[1], fabric)
        fabric.traffic.messages.clear()  # of the meeting after the tracing
        fabric.traffic.nbytes.clear()
        train(parallel, x, fabric, steps=1)

    _, world = run_ranks(grid.size, run)
    assert any(predicted), "nothing at all is predicted"
    for sent, counted in zip(predicted, world.traffic, strict=True):
        found = {str(label): (counted.messages[label], counted.nbytes[label]) for label in counted.messages}
        assert {str(label): (each.messages, each.nbytes) for label, each in sent.items()} == found


def test_without_the_sums_of_weight_gradients() -> None:
    model = made("vgg")
    plan = plan_of(model, Grid(2, 2), "batch", "model")
    x = MODELS["vgg"][1](2)
    with_sums, without = (rehearse(model, [x], Grid(2, 2), plan, BATCH, sums=sums) for sums in (True, False))
    for more, less in zip(with_sums, without, strict=True):
        assert less == {label: sent for label, sent in more.items() if label.term != "dw"}
        assert len(less) < len(more)


def test_a_fabric_alone_gives_what_is_due() -> None:
    fabric: Fabric = RehearsalFabric(1, 3)
    group, label = fabric.among((1, 2)), Label("a", "halo")
    (rows,) = group.exchange([], [Expected(1, (2, 3), torch.float64)], label).wait()
    assert rows.is_meta
    assert (tuple(rows.shape), rows.dtype) == ((2, 3), torch.float64)
    parts = group.all_gather(torch.empty(2, device="meta"), [(2,), (5,)], label).wait()
    assert [len(part) for part in parts] == [2, 5]
