"""Which parts of a slot are taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.arena.allocator import ALIGNMENT, Allocator

ACTIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=80)


def test_parts_follow_each_other_and_are_aligned() -> None:
    allocator = Allocator(100, 1000)
    assert [allocator.take(size) for size in (1, 64, 65, 0)] == [128, 192, 256, 384]
    assert allocator.parts == 4
    assert allocator.taken_bytes == 64 + 64 + 128 + 64


def test_there_is_no_room_for_more_than_there_is() -> None:
    allocator = Allocator(0, 1024)
    assert allocator.take(1025) is None
    assert allocator.take(1024) == 0
    assert allocator.take(1) is None
    assert Allocator(10, 60).take(1) is None


def test_what_is_given_back_is_given_out_again_in_one_piece() -> None:
    allocator = Allocator(0, 1024)
    starts = [allocator.take(256) for _ in range(4)]
    for start in (starts[0], starts[2], starts[1], starts[3]):
        assert start is not None
        allocator.give_back(start)
    assert allocator.take(1024) == 0


def test_nothing_is_given_back_twice() -> None:
    allocator = Allocator(0, 1024)
    start = allocator.take(10)
    assert start is not None
    allocator.give_back(start)
    with pytest.raises(KeyError):
        allocator.give_back(start)


@given(ACTIONS)
def test_parts_never_overlap(actions: list[tuple[bool, int]]) -> None:
    allocator, taken = Allocator(0, 1 << 16), {}
    for take, number in actions:
        if take:
            start = allocator.take(number)
            if start is not None:
                assert start % ALIGNMENT == 0
                assert all(start + max(1, number) <= other or other + size <= start for other, size in taken.items())
                taken[start] = max(1, number)
        elif taken:
            start = sorted(taken)[number % len(taken)]
            allocator.give_back(start)
            del taken[start]
        assert allocator.parts == len(taken)
    for start in list(taken):
        allocator.give_back(start)
    assert allocator.taken_bytes == 0
    assert allocator.take(1 << 16) == 0
