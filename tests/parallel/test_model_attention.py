"""Attention by heads, on every grid."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.parallel.model_world import GRIDS, compare, grids, part, random, randomised
from tests.precision import close
from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.attention import MultiheadAttention
from zmqtrain.parallel.model.dropout import Batch, Masks
from zmqtrain.parallel.model.linear import Linear
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import total
from zmqtrain.parallel.placement import Placement
from zmqtrain.testing.threads import ThreadFabric, ThreadWorld, run_ranks


def itself(module: nn.Module, x: Tensor) -> Tensor:
    """Self-attention whose weights are not asked for."""
    result: Tensor = module(x, x, x, need_weights=False)[0]
    return result


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_self_attention_on_every_grid(grid: Grid, dtype: torch.dtype) -> None:
    original = randomised(nn.MultiheadAttention(10, 5, batch_first=True), dtype)
    compare(original, MultiheadAttention, random(5, 4, 10, dtype=dtype), grid, call=itself)


@given(grids, st.integers(1, 6), st.integers(4, 6), st.integers(1, 3), st.integers(1, 4), *[st.booleans() for _ in range(4)])
@settings(max_examples=20)
def test_any_kind(
    grid: Grid, batch: int, heads: int, head_dim: int, times: int, bias: bool, batch_first: bool, causal: bool, first: bool
) -> None:
    original = nn.MultiheadAttention(heads * head_dim, heads, bias=bias, batch_first=batch_first)
    mask = nn.Transformer.generate_square_subsequent_mask(times, dtype=torch.float64) if causal else None
    placement = Placement(grid, sample_dimension=0 if batch_first else 1)
    compare(
        randomised(original),
        MultiheadAttention,
        random(*((batch, times) if batch_first else (times, batch)), heads * head_dim),
        grid,
        source=placement,
        target=placement,
        input_gradient=not first,
        call=lambda module, x: module(x, x, x, need_weights=False, attn_mask=mask, is_causal=causal)[0],
    )


@given(grids, st.integers(1, 5), st.sampled_from(["packed", "shared", "three"]), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=20)
def test_queries_keys_values_masks_and_weights(
    grid: Grid, batch: int, kind: str, batch_first: bool, average: bool, by_head: bool
) -> None:
    """Different tensors of different widths, masks of every form, weights for the caller; all gradients."""
    heads, times, others = 4, 3, 5
    widths = {"packed": (8, 8, 8), "shared": (8, 8, 8), "three": (8, 5, 3)}[kind]
    original = randomised(nn.MultiheadAttention(8, heads, kdim=widths[1], vdim=widths[2], batch_first=batch_first))
    order = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    query, key, value = (
        random(batch, length, width, seed=3) for length, width in zip((times, others, others), widths, strict=True)
    )
    padding = random(batch, others, seed=9) > 1
    padding[:, 0] = False
    hidden = random(batch * heads, times, others, seed=8) > 0.7 if by_head else random(times, others, seed=8) > 0.7
    hidden[..., 0] = False

    def run(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, padding: Tensor, hidden: Tensor) -> list[Tensor]:
        given = [each.clone().requires_grad_() for each in (query, key, value)]
        if kind == "shared":
            given = [given[0], given[1]]
        q, k, v = (order(each) for each in (given if len(given) == 3 else (given[0], given[1], given[1])))
        if kind == "shared":
            k = v
        output, weights = module(q, k, v, padding, attn_mask=hidden, average_attn_weights=average)
        (order(output).square().sum() + weights.square().sum()).backward()
        return [order(output).detach(), weights.detach(), *(each.grad for each in given if each.grad is not None)]

    due = run(copy.deepcopy(original), query, key, value, padding, hidden)
    placement = Placement(grid)

    def rank(fabric: ThreadFabric) -> list[Tensor]:
        layer = MultiheadAttention(original, Site("layer", grid, fabric))  # type: ignore[arg-type]
        here = [part(each, placement, fabric.rank) for each in (query, key, value, padding)]
        start, stop = placement.samples_of(batch, fabric.rank)
        return run(layer, *here, hidden[start * heads : stop * heads] if by_head else hidden)

    results, _ = run_ranks(grid.size, rank)
    for number, found in enumerate(results):
        for one, other in zip(found, due, strict=True):
            close(one, part(other, placement, number), "of attention")


@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(2, 2), Grid(3, 1)], ids=str)
def test_dropout_of_attention_is_that_of_one_process(grid: Grid) -> None:
    original, x = randomised(nn.MultiheadAttention(8, 4, dropout=0.5, batch_first=True)), random(5, 3, 8)

    def outputs(grid: Grid) -> list[Tensor]:
        def rank(fabric: ThreadFabric) -> Tensor:
            site = Site("layer", grid, fabric)
            layer = MultiheadAttention(original, site, masks=Masks(site, Batch(5), 1))  # type: ignore[arg-type]
            return itself(layer, part(x, Placement(grid), fabric.rank)).detach()

        return run_ranks(grid.size, rank)[0]

    (alone,) = outputs(Grid(1, 1))
    assert not torch.allclose(alone, itself(original.eval(), x))
    original.train()
    for rank, found in enumerate(outputs(grid)):
        close(found, part(alone, Placement(grid), rank), "output")


class Attention(nn.Module):
    """As people write it: a linear layer each for queries, keys and values."""

    def __init__(self, query: nn.Module, key: nn.Module, value: nn.Module, out: nn.Module, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out, self.heads = query, key, value, out, heads

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return result


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_separate_linear_layers_around_attention(grid: Grid) -> None:
    heads, head_dim = 5, 2

    def divide(plain: Attention, site: Site) -> Attention:
        divisions = tuple((start * head_dim, stop * head_dim) for start, stop in site.divide(heads, "heads"))
        start, stop = divisions[site.row]
        by_outputs = [
            Linear(getattr(plain, name), site.child(name), divisions=divisions, gather=False) for name in ("query", "key", "value")
        ]
        out = Linear(plain.out, site.child("out"), divisions=divisions, input_divided=True)  # type: ignore[arg-type]
        return Attention(*by_outputs, out, (stop - start) // head_dim)

    compare(
        randomised(Attention(*(nn.Linear(7, 10) for _ in range(3)), nn.Linear(10, 6), heads)),
        divide,
        random(5, 3, 7),
        grid,
        predict=lambda module, shape, itemsize, _: total(
            layer.traffic(shape if name != "out" else (*shape[:2], 10), itemsize) for name, layer in module.named_children()
        ),
    )


def test_bad_input() -> None:
    site = Site("attention", Grid(4, 1), ThreadFabric(ThreadWorld(4), 0))
    with pytest.raises(UsageError, match="attention has 2 heads, which cannot be divided over 4 rows"):
        MultiheadAttention(nn.MultiheadAttention(8, 2), site)
    with pytest.raises(UsageError, match="add_bias_kv or add_zero_attn"):
        MultiheadAttention(nn.MultiheadAttention(8, 4, add_bias_kv=True), site)
    with pytest.raises(UsageError, match="its masks must be given"):
        MultiheadAttention(nn.MultiheadAttention(8, 4, dropout=0.1), site)
    alone = MultiheadAttention(nn.MultiheadAttention(8, 4), Site("a", Grid(1, 1), ThreadFabric(ThreadWorld(1), 0)))
    with pytest.raises(UsageError, match="needs a dimension of samples"):
        itself(alone, torch.zeros(3, 8))
