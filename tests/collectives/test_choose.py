"""Which algorithm is chosen, and how payloads are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.collectives.call import pieces
from zmqtrain.collectives.choose import choose_all_gather, choose_all_reduce, choose_reduce_scatter, piece_bytes


@pytest.mark.parametrize(
    ("nbytes", "size", "algorithm"),
    [
        (4, 2, "doubling"),
        (4_000, 8, "doubling"),
        (150_000, 4, "halving"),  # between hosts, where all parameters twice take longer than more steps
        (400_000, 64, "halving"),
        (600_000, 4, "ring"),
        (100_000_000, 2, "ring"),
        (100_000_000, 7, "ring"),
        (100_000_000, 8, "ring"),
    ],
)
def test_few_steps_for_the_small_and_few_bytes_for_the_large(nbytes: int, size: int, algorithm: str) -> None:
    assert choose_all_reduce(nbytes, size) == algorithm


def test_scatter_and_gather_choose_likewise() -> None:
    assert choose_all_gather(1_000, 16) == "bruck"
    assert choose_all_gather(100_000_000, 16) == "ring"
    assert choose_reduce_scatter(1_000, 16) == "halving"
    assert choose_reduce_scatter(100_000_000, 5) == "ring"


@given(st.integers(0, 2**40), st.integers(1, 4096))
def test_every_size_has_an_algorithm(nbytes: int, size: int) -> None:
    assert choose_all_reduce(nbytes, size) in ("ring", "halving", "doubling")
    assert choose_all_gather(nbytes, size) in ("ring", "bruck")
    assert choose_reduce_scatter(nbytes, size) in ("ring", "halving")


@given(st.integers(0, 2**34), st.integers(1, 2**22))
def test_pieces_are_never_larger_than_a_chunk(part: int, chunk: int) -> None:
    assert 0 < piece_bytes(part, chunk) <= chunk


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100), st.integers(1, 20))
def test_overlapping_spans_are_cut_at_the_same_places(start: int, middle: int, stop: int, piece: int) -> None:
    start, middle, stop = sorted((start, middle, stop))
    whole = list(pieces(((start, stop),), piece))
    assert [element for a, b in whole for element in range(a, b)] == list(range(start, stop))
    assert all(b - a <= piece for a, b in whole)
    inner = list(pieces(((middle, stop),), piece))
    assert set(inner[1:]) <= set(whole)
