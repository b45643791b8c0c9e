"""Reservations of NICs, as arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.net.nics import TIMES, Nics

RATE = 1000.0
#: What asks: bytes, how long after the one before, and since when it has been ready.
ASKS = st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=30)


def make(*rates: float) -> tuple[Nics, list[float]]:
    times = [0.0] * (TIMES * len(rates))
    return Nics(times, rates), times


@given(ASKS)
def test_a_nic_carries_no_more_than_its_rate(asks: list[tuple[int, float, float]]) -> None:
    nics, _ = make(RATE)
    now, intervals = 0.0, []
    for nbytes, pause, waited in asks:
        now += pause
        ready = max(0.0, now - waited)
        start, end = nics.reserve(0, nbytes, ready)
        assert start >= ready
        assert end - start >= nbytes / RATE - 1e-9
        intervals.append((start, end, nbytes))
    for first, *_ in intervals:
        for _, last, _ in intervals:
            inside = sum(nbytes for start, end, nbytes in intervals if first <= start and end <= last)
            assert inside <= RATE * max(0.0, last - first) + 1e-6


@given(ASKS)
def test_no_window_sees_more_than_the_bandwidth(asks: list[tuple[int, float, float]]) -> None:
    """Bulk keeps to the rate, urgent messages keep to it, and only bulk that was reserved before an urgent message overlaps it."""
    nics, _ = make(RATE)
    now, through = 0.0, []
    for number, (nbytes, pause, _) in enumerate(asks):
        now += pause
        if number % 3:
            through.append((nics.reserve(0, nbytes, now)[1], nbytes))
        else:
            through.append((nics.slip([0], nbytes, now), nbytes))
    through.sort()
    for first in range(len(through)):
        for last in range(first, len(through)):
            window = through[last][0] - through[first][0]
            inside = sum(nbytes for _, nbytes in through[first : last + 1])
            assert inside <= 2 * RATE * window + 2 * max(nbytes for _, nbytes in through[first : last + 1]) + 1e-6


@given(ASKS)
def test_cards_do_not_know_of_each_other(asks: list[tuple[int, float, float]]) -> None:
    """What a host sends does not take from what it gets."""
    nics, times = make(RATE, RATE)
    for nbytes, pause, _ in asks:
        nics.reserve(0, nbytes, pause)
        nics.slip([0], nbytes, pause)
    assert times[TIMES:] == [0.0] * TIMES


@given(ASKS, st.floats(100, 10_000))
def test_what_follows_is_never_early(asks: list[tuple[int, float, float]], rate: float) -> None:
    """Behind the sender's NIC: never before the last byte was there, never faster than its own rate, in the order of asking."""
    nics, _ = make(RATE, rate)
    now, last, carried = 0.0, 0.0, 0
    for nbytes, pause, _ in asks:
        now += pause
        start, end = nics.reserve(0, nbytes, now)
        through = nics.follow([1], nbytes, start, end)
        carried += nbytes
        assert through >= end - 1e-9
        assert through >= start + nbytes / rate - 1e-6
        assert through >= last
        assert through >= carried / rate - 1e-6
        last = through


def test_cards_of_one_rate_cost_the_time_once() -> None:
    nics, _ = make(RATE, RATE, RATE)
    start, end = nics.reserve(0, 500, 2.0)
    assert nics.follow([1, 2], 500, start, end) == end == 2.5


def test_a_fast_receiver_has_time_for_many_slow_senders() -> None:
    nics, _ = make(*[RATE] * 10, 10 * RATE)
    ends = []
    for second in range(20):
        for sender in range(10):
            start, end = nics.reserve(sender, 1000, 0.0)
            ends.append(nics.follow([10], 1000, start, end))
        assert second + 1 <= max(ends) <= second + 2
    assert max(ends) <= 21


def test_a_busy_receiver_gets_from_all_in_turn() -> None:
    nics, _ = make(RATE, RATE, RATE)
    ends: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(4):
        for sender in (0, 1):
            start, end = nics.reserve(sender, 1000, 0.0)
            ends[sender].append(nics.follow([2], 1000, start, end))
    assert ends == {0: [1, 3, 5, 7], 1: [2, 4, 6, 8]}


def test_what_was_carried_meanwhile_delays_by_its_own_time() -> None:
    """A piece reserves a receiver's NIC at its end, for a time that began before; the NIC was not idle in between."""
    nics, _ = make(RATE)
    nics.reserve(0, 0, 2.0)
    for now in (4.0, 5.0, 6.0):
        nics.slip([0], 100, now)
    assert nics.follow([0], 5000, 2.0, 7.0) == pytest.approx(7.3)  # late by three times 0.1 s, and not by the 4.1 s since 2.0 s
    nics.reserve(0, 1000, 9.0)
    assert nics.reserve(0, 500, 8.0) == (8.0, 8.5)  # it was idle until 9.0
    assert nics.reserve(0, 1000, 8.0) == (8.5, pytest.approx(10.5))  # and half a second more of that: the rest is after 10.0


def test_urgent_messages_do_not_wait_for_bulk_and_bulk_pays_for_them() -> None:
    nics, _ = make(RATE, RATE)
    nics.reserve(0, 10_000, 0.0)
    assert nics.slip([0, 1], 100, 0.0) == pytest.approx(0.1)
    assert nics.slip([0, 1], 100, 0.0) == pytest.approx(0.2)  # but for each other
    assert nics.reserve(0, 1000, 0.0) == (pytest.approx(10.2), pytest.approx(11.2))
