"""Cross-entropy of divided logits on every grid."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.parallel.model_world import GRIDS, grids, part, random
from tests.precision import close
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.cross_entropy import CrossEntropy
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Sent
from zmqtrain.parallel.placement import Divisions, Placement
from zmqtrain.testing.threads import ThreadFabric, ThreadWorld, run_ranks

FORWARD, BACKWARD = Label("layer", "statistics"), Label("layer", "statistics", "backward")


def crossed(
    original: nn.CrossEntropyLoss, logits: Tensor, target: Tensor, grid: Grid, divisions: Divisions, mean_over: Any
) -> None:
    """Loss, gradient and messages against the plain loss: of the column's samples, or of the whole batch."""

    def plain(start: int, stop: int, type_: torch.dtype) -> tuple[Tensor, Tensor]:
        """Of these samples, in one process."""
        own = logits[start:stop].to(type_, copy=True).requires_grad_()
        loss = original(own, target[start:stop])
        loss.sum().backward()
        assert own.grad is not None
        return loss.detach(), own.grad

    whole, judge = (plain(0, len(logits), type_) for type_ in (logits.dtype, torch.float64))
    placement = Placement(grid, "columns", 1, divisions)

    def rank(fabric: ThreadFabric) -> tuple[Tensor, Tensor]:
        layer = CrossEntropy(original, Site("layer", grid, fabric), divisions, mean_over=mean_over)
        local = part(logits, placement, fabric.rank).requires_grad_()
        loss = layer(local, part(target, Placement(grid), fabric.rank))
        loss.sum().backward()
        counted = {label: Sent(count, fabric.traffic.nbytes[label]) for label, count in fabric.traffic.messages.items()}
        assert counted == layer.traffic(tuple(local.shape), local.element_size())
        assert local.grad is not None
        return loss.detach(), local.grad

    results, _ = run_ranks(grid.size, rank)
    for number, (loss, gradient) in enumerate(results):
        if original.reduction == "none":
            close(loss, part(whole[0], Placement(grid), number), "loss", exact=part(judge[0], Placement(grid), number))
        elif original.reduction == "mean" and mean_over == "batch":
            close(loss, whole[0], "loss", exact=judge[0])
            assert torch.equal(loss, results[0][0])
        else:
            here = tuple(slice(*each) for each in Placement(grid).block(tuple(target.shape), number))
            start, stop = here[0].start, here[0].stop
            (alone, own), (alone_judge, own_judge) = (plain(start, stop, type_) for type_ in (logits.dtype, torch.float64))
            classes = slice(*divisions[grid.place(number)[0]])
            close(loss, alone, "loss of the own samples", exact=alone_judge)
            close(gradient, own[:, classes], "gradient of the own samples", exact=own_judge[:, classes])
            continue
        close(gradient, part(whole[1], placement, number), "gradient", exact=part(judge[1], placement, number))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cross_entropy_on_every_grid(grid: Grid, dtype: torch.dtype) -> None:
    target = torch.tensor([6, 0, 3, 3, 1])
    divisions = Placement.over_rows(grid, 1, 7).divisions
    crossed(nn.CrossEntropyLoss(), random(5, 7, dtype=dtype) * 3, target, grid, divisions, "batch")


@given(
    st.data(),
    grids,
    st.integers(4, 8),
    st.integers(4, 9),
    st.sampled_from(["none", "sum", "mean"]),
    st.sampled_from(["samples", "batch"]),
    st.sampled_from([0.0, 0.2]),
    st.booleans(),
)
@settings(max_examples=35)
def test_cross_entropy_of_any_kind(
    data: st.DataObject, grid: Grid, batch: int, classes: int, reduction: Any, over: Any, smoothing: float, weighted: bool
) -> None:
    """Ignored targets, weights of classes, smoothed labels, and targets for every position."""
    shape = (batch, *data.draw(st.sampled_from([(), (3,), (2, 2)])))
    target = torch.randint(classes, shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
    ignored = data.draw(st.sampled_from([-100, 1]))
    if math.prod(shape) > 4 * grid.columns:  # whoever has none left would divide by zero, as the plain loss does
        target.view(batch, -1)[0, 0] = ignored
    target[target == ignored] = 0 if reduction == "mean" and over == "samples" else ignored
    original = nn.CrossEntropyLoss(
        random(classes, seed=4).abs() + 0.1 if weighted else None,
        ignore_index=ignored,
        reduction=reduction,
        label_smoothing=smoothing,
    )
    divisions = Placement.over_rows(grid, 1, classes).divisions
    crossed(original, random(batch, classes, *shape[1:]) * 3, target, grid, divisions, over)


def test_large_logits_and_minus_infinity() -> None:
    """Where exponentials would overflow, and where a row has nothing but impossible classes."""
    grid = Grid(3, 1)
    logits = torch.tensor([[-math.inf, -math.inf, 900.0, -math.inf, -1e4, 901.0]], dtype=torch.float64)
    crossed(nn.CrossEntropyLoss(), logits, torch.tensor([2]), grid, ((0, 2), (2, 4), (4, 6)), "samples")
    crossed(nn.CrossEntropyLoss(), -logits.nan_to_num(neginf=-800), torch.tensor([2]), grid, ((0, 2), (2, 4), (4, 6)), "samples")


def test_a_loss_sends_numbers_and_never_logits() -> None:
    grid, layer = Grid(4, 1), nn.CrossEntropyLoss()
    site = Site("layer", grid, ThreadFabric(ThreadWorld(4), 0))
    divisions = Placement.over_rows(grid, 1, 1000).divisions
    traffic = CrossEntropy(layer, site, divisions).traffic((32, 250), 4)
    assert traffic == {FORWARD: Sent(3, 3 * 3 * 32 * 4)}


def test_bad_input() -> None:
    site = Site("loss", Grid(1, 1), ThreadFabric(ThreadWorld(1), 0))
    loss = CrossEntropy(nn.CrossEntropyLoss(), site, ((0, 5),))
    with pytest.raises(UsageError, match="targets that are probabilities need logits that are whole"):
        loss(torch.zeros(2, 5), torch.zeros(2, 5))
    with pytest.raises(UsageError, match="where this row has classes 0 to 5"):
        loss(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UsageError, match="a target is none of the 5 classes"):
        loss(torch.zeros(2, 5), torch.tensor([0, 5]))
    with pytest.raises(UsageError, match="3 weights for 5 classes"):
        CrossEntropy(nn.CrossEntropyLoss(torch.ones(3)), site, ((0, 5),))
