"""What is chosen of measurements, and where a model's FC phase begins."""

from __future__ import annotations

import pytest
import torch

from zmqtrain.plan.layers import Kind, LayerShape
from zmqtrain.plan.measure.choose import doubling, levelled_off, smallest_good
from zmqtrain.plan.measure.peak import measure_peak, threads
from zmqtrain.plan.measure.phases import fc_begins
from zmqtrain.plan.measure.timing import Patience, Times, repeat


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([(1, 10.0), (2, 19.0), (4, 30.0)], 4),
        ([(1, 10.0), (2, 29.5), (4, 30.0)], 2),  # as good as
        ([(1, 10.0), (2, 30.0), (4, 20.0)], 2),
        ([(4, 1.0), (2, 1.0)], 2),
    ],
)
def test_the_smallest_that_is_as_good_as_the_best(found: list[tuple[int, float]], chosen: int) -> None:
    assert smallest_good(found) == chosen


@pytest.mark.parametrize(
    ("rates", "levelled"),
    [
        ([], False),
        ([5.0, 5.0], False),
        ([1, 5, 5.1, 5.0], True),
        ([1, 5, 5.1, 5.3], False),
        ([1, 2, 3, 4], False),
        ([5, 4, 3], True),
    ],
)
def test_larger_steps_are_tried_while_they_bring_more(rates: list[float], levelled: bool) -> None:
    assert levelled_off(rates) is levelled


def test_doubling() -> None:
    assert [doubling(most) for most in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("kinds", "begins"),
    [
        (["conv", "pool", "conv", "other", "linear", "other", "linear"], 4),
        (["linear", "conv", "other", "linear"], 3),  # a linear layer before the last convolution is none of the FC phase
        (["embedding", "linear", "attention", "linear"], 3),  # without convolutions: the output projection
        (["embedding", "recurrent"], 2),
        (["conv", "conv"], 2),
    ],
)
def test_where_the_fc_phase_begins(kinds: list[Kind], begins: int) -> None:
    layers = [LayerShape(str(place), kind, (1,), (1,)) for place, kind in enumerate(kinds)]
    assert fc_begins(layers) == begins


def test_repeating_is_bounded_by_time_and_number() -> None:
    now, calls = 0.0, 0

    def run() -> None:
        nonlocal now, calls
        now += 1.0
        calls += 1

    assert repeat(run, lambda: now, Patience(10.0, least=2, most=4, warm_up=1)) == [1.0] * 4
    assert calls == 5
    assert len(repeat(run, lambda: now, Patience(2.5, least=2, most=40, warm_up=0))) == 3
    assert len(repeat(run, lambda: now, Patience(0.0, least=2, most=40, warm_up=0))) == 2
    assert Times.of([1, 2, 3, 4, 5]) == Times(3.0, 1.0)


def test_the_peak_is_the_faster_of_both_products() -> None:
    before = torch.get_num_threads()
    with threads(1):
        peak = measure_peak(torch.device("cpu"), Patience(0.0, least=1, warm_up=1))
    assert 1e8 < peak.sgemm <= peak.product < 1e13
    assert torch.get_num_threads() == before
