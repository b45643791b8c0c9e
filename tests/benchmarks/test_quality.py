"""When the systems that are compared have reached a loss."""

from __future__ import annotations

import pytest

from benchmarks.quality import EVALUATE_EVERY, OURS, PARTS, PEERS, bench_quality, combined, reached
from benchmarks.quality_peer import EVALUATE_EVERY as PEERS_EVALUATE_EVERY
from benchmarks.quality_peer import SYSTEMS
from zmqtrain.errors import UsageError


def test_an_evaluation_ends_with_its_last_rank_and_counts_samples() -> None:
    logs = [["1.0 8.0 4", "2.0 4.0 4"], ["1.5 10.0 2"]]  # the second rank has not evaluated twice
    assert combined(logs) == [(1.5, 3.0)]
    assert combined([[], ["1 2 3"]]) == []


def test_the_first_evaluation_that_is_good_enough_counts() -> None:
    assert reached([(1.0, 2.0), (2.0, 1.5), (3.0, 1.0), (4.0, 1.6)], 1.5) == 2.0
    assert reached([(1.0, 2.0)], 1.5) is None


def test_all_evaluate_as_often_and_each_peer_is_known() -> None:
    assert EVALUATE_EVERY == PEERS_EVALUATE_EVERY
    assert set(PEERS.values()) == set(SYSTEMS)
    assert not set(PEERS) & set(OURS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": ["cifar"]}, f"no part 'cifar'; there are {PARTS[0]}"),
        ({"systems": ["mpi"]}, "no system 'mpi'; there are all-reduce"),
        ({}, "needs --data"),
    ],
)
def test_what_it_needs_is_said(arguments: dict[str, list[str]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(bench_quality(**arguments))  # type: ignore[arg-type]
