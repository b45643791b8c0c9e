"""Reservations of network cards, as arithmetic."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.net.cards import TIMES, Cards

RATE = 1000.0
#: What asks: bytes, how long after the one before, and since when it has been ready.
ASKS = st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=30)


def make(*rates: float) -> tuple[Cards, list[float]]:
    times = [0.0] * (TIMES * len(rates))
    return Cards(times, rates), times


@given(ASKS)
def test_a_card_carries_one_after_the_other_at_its_rate(asks: list[tuple[int, float, float]]) -> None:
    cards, _ = make(RATE)
    now, intervals = 0.0, []
    for nbytes, pause, waited in asks:
        now += pause
        ready = max(0.0, now - waited)
        start, end = cards.reserve(0, nbytes, ready)
        assert start >= ready
        assert end - start == pytest.approx(nbytes / RATE, abs=1e-9)
        intervals.append((start, end))
    assert all(before[1] <= after[0] for before, after in pairwise(intervals))


@given(ASKS)
def test_no_window_sees_more_than_the_bandwidth(asks: list[tuple[int, float, float]]) -> None:
    """Bulk keeps to the rate, urgent messages keep to it, and only bulk that was reserved before an urgent message overlaps it."""
    cards, _ = make(RATE)
    now, through = 0.0, []
    for number, (nbytes, pause, _) in enumerate(asks):
        now += pause
        if number % 3:
            through.append((cards.reserve(0, nbytes, now)[1], nbytes))
        else:
            through.append((cards.slip([0], nbytes, now), nbytes))
    through.sort()
    for first in range(len(through)):
        for last in range(first, len(through)):
            window = through[last][0] - through[first][0]
            inside = sum(nbytes for _, nbytes in through[first : last + 1])
            assert inside <= 2 * RATE * window + 2 * max(nbytes for _, nbytes in through[first : last + 1]) + 1e-6


@given(ASKS)
def test_cards_do_not_know_of_each_other(asks: list[tuple[int, float, float]]) -> None:
    """What a host sends does not take from what it gets."""
    cards, times = make(RATE, RATE)
    for nbytes, pause, _ in asks:
        cards.reserve(0, nbytes, pause)
        cards.slip([0], nbytes, pause)
    assert times[TIMES:] == [0.0, 0.0]


@given(ASKS, st.floats(100, 10_000))
def test_what_follows_is_never_early(asks: list[tuple[int, float, float]], rate: float) -> None:
    """Behind the sender's card: never before the last byte was there, never faster than its own rate, in the order of asking."""
    cards, _ = make(RATE, rate)
    now, last, carried = 0.0, 0.0, 0
    for nbytes, pause, _ in asks:
        now += pause
        start, end = cards.reserve(0, nbytes, now)
        through = cards.follow([1], nbytes, start, end)
        carried += nbytes
        assert through >= end - 1e-9
        assert through >= start + nbytes / rate - 1e-6
        assert through >= last
        assert through >= carried / rate - 1e-6
        last = through


def test_cards_of_one_rate_cost_the_time_once() -> None:
    cards, _ = make(RATE, RATE, RATE)
    start, end = cards.reserve(0, 500, 2.0)
    assert cards.follow([1, 2], 500, start, end) == end == 2.5


def test_a_fast_receiver_has_time_for_many_slow_senders() -> None:
    cards, _ = make(*[RATE] * 10, 10 * RATE)
    ends = []
    for second in range(20):
        for sender in range(10):
            start, end = cards.reserve(sender, 1000, 0.0)
            ends.append(cards.follow([10], 1000, start, end))
        assert second + 1 <= max(ends) <= second + 2
    assert max(ends) <= 21


def test_a_busy_receiver_gets_from_all_in_turn() -> None:
    cards, _ = make(RATE, RATE, RATE)
    ends: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(4):
        for sender in (0, 1):
            start, end = cards.reserve(sender, 1000, 0.0)
            ends[sender].append(cards.follow([2], 1000, start, end))
    assert ends == {0: [1, 3, 5, 7], 1: [2, 4, 6, 8]}


def test_urgent_messages_do_not_wait_for_bulk_and_bulk_pays_for_them() -> None:
    cards, _ = make(RATE, RATE)
    cards.reserve(0, 10_000, 0.0)
    assert cards.slip([0, 1], 100, 0.0) == pytest.approx(0.1)
    assert cards.slip([0, 1], 100, 0.0) == pytest.approx(0.2)  # but for each other
    assert cards.reserve(0, 1000, 0.0) == (pytest.approx(10.2), pytest.approx(11.2))
