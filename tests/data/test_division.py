"""Who trains which samples of a step when workers are lost and others come: tables, and random histories."""

from __future__ import annotations

import random

import numpy as np
import pytest

from zmqtrain.data.division import Division, Span, cut_of, length_of, merged, spans_of
from zmqtrain.data.partition import Partition
from zmqtrain.data.slots import Life
from zmqtrain.errors import ProtocolError

A, B, C, D = ("worker/0", 1), ("worker/1", 2), ("worker/2", 3), ("worker/1", 4)


def test_without_a_loss_all_divide_the_samples_of_each_step() -> None:
    division = Division([A, B, C], 8)
    assert [division.spans(1, life) for life in (A, B, C)] == [((8, 11),), ((11, 14),), ((14, 16),)]
    assert division.spans(1, D) == ()
    assert division.rest(7) == ((), 56)


def test_what_a_lost_worker_has_left_comes_first_and_the_batch_stays() -> None:
    division = Division([A, B, C], 6)
    division.change(4, [A, C], complete=1)  # steps 2 and 3 go on without B
    assert division.spans(4, A) == ((14, 16), (20, 21))
    assert division.spans(4, C) == ((21, 22), (24, 26))
    assert [division.spans(5, life) for life in (A, C)] == [((26, 29),), ((29, 32),)]
    assert division.rest(5) == ((), 26)


def test_shares_stay_where_the_batch_is_in_proportion_to_the_members() -> None:
    division = Division([A, B, C], 6, usual=3)
    division.change(4, [A, C], complete=1)  # steps 2 and 3 go on without B
    assert division.spans(4, A) == ((14, 16),)
    assert division.spans(4, C) == ((20, 22),)
    assert [division.spans(5, life) for life in (A, C)] == [((24, 26),), ((26, 28),)]
    assert (division.growth(3), division.growth(4)) == (1.0, 2 / 3)
    theirs = Division.from_value(division.to_value(6), 6, 3)
    for each in (theirs, division):
        each.change(6, [A, B, C, D], complete=5)
        assert each.size(6) == 8
    assert division.size(5) == 4
    division.total = 60
    assert division.rest(6) == ((), 28)
    assert division.end == 6 + 4
    assert sum(division.size(step) for step in range(6, 10)) == 32


def test_a_step_that_counted_only_for_one_who_is_lost_too_is_given_up() -> None:
    division = Division([A, B, C], 6)
    division.change(4, [A, C], complete=2)  # only A has completed step 2, with B
    division.change(4, [C], complete=1)
    assert division.eras[-1].left == ((12, 16), (18, 22))


def test_a_newcomer_goes_on_with_what_it_is_told() -> None:
    division = Division([A, B, C], 6)
    division.change(4, [A, C], complete=2)
    division.change(6, [A, C, D], complete=4)
    theirs = Division.from_value(division.to_value(6), 6)
    for life in (A, C, D):
        assert [theirs.spans(step, life) for step in range(6, 9)] == [division.spans(step, life) for step in range(6, 9)]
    for each in (theirs, division):
        each.change(8, [C, D], complete=6)
    assert theirs.eras[-1] == division.eras[-1]
    for wrong in ([], [[1, 2]], [[0, [["a", 1]], 0, [[3, 2]]]], [[0, ["a"], 0, []]]):
        with pytest.raises(ProtocolError):
            Division.from_value(wrong, 6)


def test_a_resumed_run_owes_nothing_of_the_steps_before() -> None:
    division = Division([A, B, C], 6, since=10)
    assert division.samples(9, [A, B]) == 4
    division.change(1, [A, C], complete=-1)
    assert division.eras == [division.eras[-1]]
    assert division.spans(10, A) == ((60, 63),)


@pytest.mark.parametrize(("total", "end", "last"), [(24, 4, 6), (26, 5, 2), (25, 4, 7), (12, 4, 6)])
def test_the_last_step_takes_what_is_left(total: int, end: int, last: int) -> None:
    """A step has at least one sample for each worker."""
    division = Division([A, B], 6, first=0 if total > 12 else -12)
    division.total = total if total > 12 else 12
    assert division.end == end
    assert division.size(end - 1) == last
    assert [division.due(step) for step in (0, 3)] == [sum(division.size(step) for step in range(since, end)) for since in (0, 3)]


def test_one_that_comes_after_the_end_adds_no_step() -> None:
    """Others have begun to wait for what follows step 3, the last one, when all learn that somebody comes, and that another one is
    lost: nothing is left."""
    division = Division([A, B], 6)
    division.total = 24
    division.change(5, [A, B, C], complete=3)
    division.change(6, [A, C], complete=3)
    assert division.end == 4
    division.change(7, [C], complete=2)  # nobody is left that had completed step 3
    assert division.end == 7 + 1


def test_a_fixed_number_of_steps_stays() -> None:
    division = Division([A, B], 6)
    division.steps = 4
    division.change(3, [A], complete=1)
    assert division.end == 4


@pytest.mark.parametrize("seed", range(8))
def test_each_sample_counts_once_in_any_history(seed: int) -> None:
    draw = random.Random(seed)
    lives: list[Life] = [(f"worker/{rank}", 0) for rank in range(4)]
    division = Division(lives, 24)
    division.total = 24 * 30
    there, step, counted = list(lives), 0, list[Span]()
    while step < (division.end or 0):
        gone = [life for life in there if len(there) > 1 and draw.random() < 0.05][: len(there) - 1]
        under_way = min(draw.randint(1, 2), (division.end or 0) - step)
        for life in there:
            counted += [span for each in range(step, step + under_way) if life not in gone for span in division.spans(each, life)]
        came = [(peer, process + 1) for peer, process in lives if (peer, process) not in there and draw.random() < 0.3]
        lives = [next((life for life in came if life[0] == peer), (peer, process)) for peer, process in lives]
        if gone or came:
            there = sorted([life for life in there if life not in gone] + came)
            division.change(step + under_way, there, complete=step - 1)
        step += under_way
    whole = merged(counted)
    assert length_of(counted) == length_of(whole) >= division.total - 3
    assert whole[0][0] == 0


def test_positions_name_the_samples_of_epochs() -> None:
    partition = Partition(20, 2, 2, 4, seed=1)
    order = np.concatenate([partition.run(step, 0, 8) for step in range(4)])
    assert partition.of_spans([(3, 5), (6, 19)]).tolist() == [*order[3:5], *order[6:19]]


def test_spans_are_cut_and_checked() -> None:
    assert cut_of([(0, 4), (10, 12), (20, 30)], 3, 8) == ((3, 4), (10, 12), (20, 22))
    assert merged([(4, 6), (0, 4), (8, 9)]) == ((0, 6), (8, 9))
    with pytest.raises(ProtocolError):
        spans_of([[1, "2"]], ProtocolError)
