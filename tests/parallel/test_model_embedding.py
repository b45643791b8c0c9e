"""Embeddings by features and by vocabulary on every grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.parallel.model_world import GRIDS, compare, grids, randomised
from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.embedding import Embedding
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.placement import Placement
from zmqtrain.testing.threads import ThreadFabric, ThreadWorld


def words(*shape: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("by", ["features", "vocabulary"])
def test_on_every_grid(grid: Grid, by: Any) -> None:
    original = randomised(nn.Embedding(11, 6, padding_idx=3), torch.float32)
    x = words(5, 4, vocabulary=11)
    compare(original, lambda layer, site: Embedding(layer, site, by=by), x, grid, input_gradient=False)


@given(
    grids,
    st.integers(1, 6),
    st.integers(4, 9),
    st.integers(4, 9),
    st.sampled_from(["features", "vocabulary"]),
    st.sampled_from([None, 0, 3, -1]),
)
@settings(max_examples=20)
def test_any_size(grid: Grid, batch: int, vocabulary: int, features: int, by: Any, padding: int | None) -> None:
    original = randomised(nn.Embedding(vocabulary, features, padding_idx=padding))
    x = words(batch, 3, vocabulary=vocabulary)
    compare(original, lambda layer, site: Embedding(layer, site, by=by), x, grid, input_gradient=False)


def test_divided_features() -> None:
    grid = Grid(3, 2)
    compare(
        randomised(nn.Embedding(5, 7)),
        lambda layer, site: Embedding(layer, site, gather=False),
        words(5, 2, vocabulary=5),
        grid,
        target=Placement.over_rows(grid, -1, 7),
        input_gradient=False,
    )


def test_bad_input() -> None:
    site = Site("words", Grid(4, 1), ThreadFabric(ThreadWorld(4), 0))
    with pytest.raises(UsageError, match="words has 3 features, which cannot be divided over 4 rows"):
        Embedding(nn.Embedding(9, 3), site)
    with pytest.raises(UsageError, match="words has 3 words, which cannot be divided over 4 rows"):
        Embedding(nn.Embedding(3, 9), site, by="vocabulary")
    for what, value in (("max_norm", 1.0), ("sparse", True), ("scale_grad_by_freq", True)):
        with pytest.raises(UsageError, match=f"words: an embedding with {what} cannot be divided"):
            Embedding(nn.Embedding(9, 9, **{what: value}), site)  # type: ignore[arg-type]
