"""Whole parts by weights: they add up, are as near to the weights as they can be, and nobody gets less than the least."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.data.parts import bounds_of, parts_of


@pytest.mark.parametrize(
    ("count", "weights", "least", "parts"),
    [
        (10, [1, 1, 1], 1, (4, 3, 3)),
        (24, [2, 1], 1, (16, 8)),
        (10, [1, 0], 1, (9, 1)),
        (10, [1, 0], 0, (10, 0)),
        (10, [8, 1, 1], 2, (6, 2, 2)),
        (20, [100, 1, 20], 4, (12, 4, 4)),  # only with the first least does the third's share become too small
        (3, [5, 1, 1], 1, (1, 1, 1)),
        (7, [0.5, 0.25], 1, (5, 2)),
    ],
)
def test_parts(count: int, weights: list[float], least: int, parts: tuple[int, ...]) -> None:
    assert parts_of(count, weights, least=least) == parts


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.integers(0, 4), st.integers(0, 500))
def test_parts_are_fair(weights: list[float], least: int, more: int) -> None:
    count = least * len(weights) + more
    parts = parts_of(count, weights, least=least)
    assert sum(parts) == count
    assert min(parts) >= least
    exact = [count * weight / sum(weights) for weight in weights]
    if min(exact) >= least:
        assert all(abs(part - share) < 1 + 1e-9 for part, share in zip(parts, exact, strict=True))
    order = sorted(range(len(weights)), key=lambda place: weights[place])
    assert all(parts[a] <= parts[b] + 1 for a, b in pairwise(order)), "more weight, no smaller part"
    assert [bounds_of(parts, place)[1] - bounds_of(parts, place)[0] for place in range(len(parts))] == list(parts)
    assert bounds_of(parts, len(parts) - 1)[1] == count


@pytest.mark.parametrize(("count", "weights"), [(1, [1.0, 1.0]), (9, []), (9, [0.0, 0.0]), (9, [2.0, -1.0])])
def test_what_cannot_be_divided(count: int, weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"cannot be|are not valid weights"):
        parts_of(count, weights)
