"""Streams of operations, and who comes first."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from zmqtrain.c10d.order import PROGRAM, Following, Line, next_call


@dataclass(eq=False)
class Group:
    ranks: int
    callbacks: bool = False

    def size(self) -> int:
        return self.ranks


@dataclass(frozen=True)
class Job:
    name: str
    stream: int = PROGRAM


def counted() -> Callable[[], int]:
    return itertools.count(1).__next__


def test_what_a_callback_calls_is_numbered_by_itself() -> None:
    group, count = Group(2), counted()
    first = next_call(group, count)
    following = Following(group, first)
    assert not group.callbacks
    callback = following.next(0)
    assert group.callbacks
    with callback:
        inner = [next_call(group, count) for _ in range(2)]
        with Following(group, inner[0]).next(0):
            innermost = next_call(group, count)
        inner.append(next_call(group, count))
    assert [first, next_call(group, count)] == [(PROGRAM, 1), (PROGRAM, 2)]
    assert [number for _, number in inner] == [1, 2, 3]
    assert innermost[1] == 1
    streams = {stream for stream, _ in inner}
    assert len(streams) == 1
    assert len({PROGRAM, innermost[0], *streams}) == 3


def test_the_names_of_streams_are_the_same_on_all_ranks_and_others_for_each_callback() -> None:
    def names(group: Group, called: Group) -> list[int]:
        found = []
        for number, place in ((1, 0), (1, 1), (2, 0)):
            with Following(group, (PROGRAM, number)).next(place):
                found.append(next_call(called, counted())[0])
        return found

    groups = [Group(2), Group(2)]  # one of each rank
    assert names(groups[0], groups[0]) == names(groups[1], groups[1])
    # Two groups that are parts of a third one, all of whose ranks follow theirs.
    whole = Group(4)
    assert names(groups[0], whole) == names(groups[1], whole)
    assert len({*names(whole, whole), *names(groups[0], whole)}) == 6


def test_operations_come_in_the_order_of_calls_but_for_the_one_that_is_sought() -> None:
    line: Line[Job] = Line()
    one, two, other = Job("one"), Job("two"), Job("other", 5)
    for each in (one, two):
        line.add(each)
    assert not line.seeks
    line.put_back(line.take(), 5)
    assert line.seeks
    assert line.first == one
    line.add(other)
    assert not line.seeks
    assert [line.take() for _ in range(3)] == [other, one, two]
    assert not line
    assert not line.seeks


def test_an_operation_that_comes_first_itself_is_begun_again() -> None:
    line: Line[Job] = Line()
    line.add(Job("one", 5))
    line.put_back(line.take(), 5)
    assert not line.seeks
    assert line.take().name == "one"


def test_what_is_not_found_is_given_up() -> None:
    line: Line[Job] = Line()
    line.add(Job("one"))
    line.put_back(line.take(), 5)
    line.give_up()
    assert line.take().name == "one"
