"""The paper's study: what holds of it, what its printed equations give, and which readings come near to what it states."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.study import PROBLEM, PROCESSES, STATED, Compared, bench_study, compare, nearest, readings


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return [compare(replace(PROBLEM, processes=size)) for size in PROCESSES]


def test_best_grids_and_gains_by_the_printed_equations(compared: list[Compared]) -> None:
    found = [
        (str(each.same.grid), round(each.gain(each.same.price.exposed_s), 2),
         str(each.connected.grid), round(each.gain(each.connected.price.exposed_s), 2))
        for each in compared
    ]  # fmt: skip
    assert found == [
        ("1x8", 1.0, "4x2", 1.98), ("2x16", 1.11, "8x4", 3.17), ("4x32", 1.82, "16x8", 5.01), ("8x64", 3.31, "32x16", 7.42)
    ]  # fmt: skip
    assert compared[-1].batch.price.exposed_s * 1e3 == pytest.approx(83.28, abs=0.005)


def test_the_orderings_that_hold(compared: list[Compared]) -> None:
    gains = [
        tuple(
            each.gain(seconds) for seconds in (each.same.price.exposed_s, each.connected.price.exposed_s, each.free.price.exposed_s)
        )
        for each in compared
    ]
    assert gains[0][0] == 1.0
    for same, connected, free in gains:
        assert same < connected < free
    for before, after in pairwise(gains):
        assert all(one < other for one, other in zip(before, after, strict=True))
    for each in compared:  # in the same account, with Eq. 6 charged to both
        assert each.free_charged.price.exposed_s < each.connected_charged.price.exposed_s


def test_what_the_paper_states_is_near_to_other_readings_only() -> None:
    found = readings(PROBLEM)
    assert len(found) == 48
    printed = [each for each in found if (each.network, each.activations, each.dx) == ("alexnet", "after pooling", True)]
    assert {each.rule: round(each.gain, 2) for each in printed} == {"same grid": 3.31, "connected only": 7.42}
    assert all(each.distance > 0.2 for each in printed)
    same, connected = nearest(found, "same grid"), nearest(found, "connected only")
    assert not any(each.dx for each in same)
    by_name = {str(each): each for each in [*same, *connected]}
    plain = by_name["alexnet-224, activations after pooling, no sums of input gradients"]
    assert plain.stated_grid_gain == pytest.approx(STATED["same grid"], rel=0.02)
    grouped = by_name["alexnet-grouped-224-padded, activations after pooling, all sums"]
    assert grouped.gain == pytest.approx(STATED["connected only"], rel=0.02)


def test_cases() -> None:
    cases = {case["case"]: case for case in bench_study(processes=[512])}
    assert cases["AlexNet on 512 processes, pure batch"]["value"] == 83.28
    same = cases["AlexNet on 512 processes, one grid for all layers, best on 8x64"]
    assert (same["value"], same["peer_value"], same["ratio"]) == (3.31, 5.0, 0.66)
    assert cases["AlexNet on 512 processes, any choice and grid for each layer"]["value"] == 8.13
    assert sum("one grid for all layers, on 16x32: " in name for name in cases) == 3
