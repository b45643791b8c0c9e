"""Eq. 3 to 9 of Gholami et al. as functions of their own, each a case of what `Paper` prices a layer by."""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.parallel.grid import Grid
from zmqtrain.plan.costs import WORD_BYTES, Paper, Pricing
from zmqtrain.plan.layers import Stage
from zmqtrain.plan.link import Cost, LayerCost
from zmqtrain.plan.placed import Placed


def pure_model(layers: Sequence[Stage], batch: int, processes: int, pricing: Pricing | None = None) -> list[LayerCost]:
    """Eq. 3, pure model parallelism: all-gathers of Y for i = 1..L, all-reduces of dX for i = 2..L.

    sum_i (alpha ceil(log P) + beta B (P-1)/P d_i) + 2 sum_(i>1) (alpha ceil(log P) + beta B (P-1)/P d_(i-1))
    """
    return integrated(layers, batch, [Placed("model", Grid(processes, 1))] * len(layers), pricing)


def pure_batch(layers: Sequence[Stage], batch: int, processes: int, pricing: Pricing | None = None) -> list[LayerCost]:
    """Eq. 4, pure batch parallelism: all-reduces of dW. Does not depend on the batch.

    2 sum_i (alpha ceil(log P) + beta (P-1)/P |W_i|)
    """
    return integrated(layers, batch, [Placed("batch", Grid(1, processes))] * len(layers), pricing)


def batch_over_model(layer: Stage, batch: float) -> float:
    """Eq. 5: the volume of batch parallelism over that of model parallelism, 2 |W_i| / (3 B d_i). For a convolution between images
    of the same size, that is 2 kh kw X_C / (3 B Y_H Y_W). Above 1, model parallelism sends less."""
    return 2 * layer.weights / (3 * batch * layer.numel_out)


def break_even_batch(layer: Stage) -> float:
    """The batch (a column's, B/Pc) at which Eq. 5 is 1: below it model parallelism sends less, above it batch parallelism does."""
    return batch_over_model(layer, 1)


def redistribution(layer: Stage, batch: int, processes: int, word_bytes: int = WORD_BYTES) -> Cost:
    """Eq. 6: a layer's activations from batch to model parallelism, alpha ceil(log P) + beta B (P-1)/P d_i.

    As much as the model-parallel layer's own all-gather, so that the sum is of the same order without it.
    """
    batch_parallel, model_parallel = Placed("batch", Grid(1, processes)), Placed("model", Grid(processes, 1))
    messages, rest = Paper(word_bytes).change(layer, batch_parallel, layer, model_parallel)
    return Cost(messages) + rest.times(batch * layer.numel_out * word_bytes)


def pure_domain(layers: Sequence[Stage], batch: int, processes: int, pricing: Pricing | None = None) -> list[LayerCost]:
    """Eq. 7, domain parallelism: halos forward and backward, and all-reduces of dW, whose weights every process has whole.

    sum_i (alpha + beta B X_W X_C floor(kh/2)) + sum_i (alpha + beta B Y_W Y_C floor(kh/2)) + Eq. 4
    """
    return integrated(layers, batch, [Placed("domain", Grid(processes, 1))] * len(layers), pricing)


def model_and_batch(layers: Sequence[Stage], batch: int, grid: Grid, pricing: Pricing | None = None) -> list[LayerCost]:
    """Eq. 8, integrated model and batch parallelism on one grid.

    sum_i (alpha ceil(log Pr) + beta B/Pc (Pr-1)/Pr d_i) + 2 sum_(i>1) (alpha ceil(log Pr) + beta B/Pc (Pr-1)/Pr d_(i-1))
    + 2 sum_i (alpha ceil(log Pc) + beta (Pc-1)/Pc |W_i|/Pr)
    """
    return integrated(layers, batch, [Placed("model", grid)] * len(layers), pricing)


def integrated(layers: Sequence[Stage], batch: int, placed: Sequence[Placed], pricing: Pricing | None = None) -> list[LayerCost]:
    """Eq. 9, integrated model, batch and domain parallelism: model layers take the terms of Eq. 8, domain layers those of Eq. 7
    with B/Pc samples, batch layers those of Eq. 4. Changes of placement between layers (Eq. 6) are not in it."""
    by = pricing or Paper()
    return [by.layer(stage, how, batch, first=index == 0) for index, (stage, how) in enumerate(zip(layers, placed, strict=True))]
