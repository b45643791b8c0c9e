"""What servers decide when groups are lost, come late or have nothing to do for a while: tables without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from zmqtrain.exchange.server_messages import PushMeta
from zmqtrain.server.aggregator import Aggregator, Batch, Push
from zmqtrain.server.shard import GroupSum
from zmqtrain.server.staleness import DuplicatePushError, Policy, StalenessMachine, UnknownGroupError

SYNC, ASYNC, BOUND = Policy("sync"), Policy("async"), Policy("bound", 1)


def machine(policy: Policy, *steps: int) -> StalenessMachine:
    """One with as many groups as ``steps``, each of which has pushed so many steps."""
    made = StalenessMachine(policy, range(len(steps)))
    for step in range(max(steps)):
        for group, until in enumerate(steps):
            if step < until:
                made.pushed(group, step)
    return made


class TestEntering:
    def test_async_at_once(self) -> None:
        made = machine(ASYNC, 3, 1)
        made.left(1)
        assert made.enter(1, 5).entered == (1,)
        assert made.expected(1) == 5
        assert made.pushed(1, 5).answer == ((1, 6),)

    def test_bound_not_before_it_may_begin(self) -> None:
        made = machine(BOUND, 3, 2)
        made.left(1)
        assert made.enter(1, 5).entered == ()  # two steps ahead of group 0
        decision = made.pushed(0, 3)
        assert decision.entered == (1,)
        assert decision.answer == ((0, 4),)

    def test_sync_when_all_steps_before_its_own_are_done(self) -> None:
        made = machine(SYNC, 2, 2, 2)
        made.pushed(0, 2)
        made.left(2)
        assert made.enter(2, 3).entered == ()
        assert made.enter(2, 4).entered == ()  # others change once more; its first step stays
        assert made.groups == (0, 1)
        decision = made.pushed(1, 2)
        assert decision.apply == (0, 1)
        assert decision.answer == ((0, 3), (1, 3))
        assert decision.entered == (2,)
        assert made.pushed(0, 3).apply == made.pushed(2, 3).apply == ()
        assert made.pushed(1, 3).apply == (0, 1, 2)

    def test_sync_at_once_if_the_others_wait_for_the_step(self) -> None:
        made = machine(SYNC, 2, 2)
        made.left(1)
        assert made.enter(1, 2).entered == (1,)

    def test_one_that_is_lost_before_it_could_enter(self) -> None:
        made = machine(SYNC, 2, 2, 2)
        made.left(2)
        made.enter(2, 3)
        assert made.clock(2) == 3
        made.left(2)
        made.pushed(0, 2)
        assert made.pushed(1, 2).entered == ()
        with pytest.raises(UnknownGroupError):
            made.pushed(2, 3)

    def test_sync_one_after_the_other_if_all_who_were_there_are_lost(self) -> None:
        made = machine(SYNC, 1, 1, 1)
        made.left(0)
        made.enter(0, 2)
        made.left(1)
        made.enter(1, 3)
        assert made.left(2).entered == (0,)
        decision = made.pushed(0, 2)
        assert (decision.apply, decision.answer, decision.entered) == ((0,), ((0, 3),), (1,))

    @pytest.mark.parametrize("begun", [True, False])
    def test_sync_one_that_has_rested_pushes_what_it_has_begun_before(self, begun: bool) -> None:
        made = machine(SYNC, 2, 2)
        made.rest(1)
        made.pushed(0, 2)
        assert made.enter(1, 3).entered == ()
        assert made.done(1) == 2, "nothing that it has not pushed counts, if it is lost now"
        made.load(made.state())
        if begun:
            assert made.pushed(1, 2).apply == ()
            decision = made.pushed(0, 3)
            assert (decision.apply, decision.answer) == ((0, 1), ((0, 4), (1, 3)))
        with pytest.raises(DuplicatePushError):
            made.pushed(1, 1)
        assert made.pushed(1, 3).reason
        assert made.done(1) == 4
        with pytest.raises(DuplicatePushError):
            made.pushed(1, 2)

    def test_those_who_are_there_stay_as_they_are(self) -> None:
        made = machine(ASYNC, 3, 1)
        assert made.enter(0, 5) == made.enter(1, 5) == type(made.enter(0, 5))()
        assert (made.expected(0), made.expected(1)) == (3, 1)


class TestResting:
    def test_bound_does_not_wait_for_it(self) -> None:
        made = machine(BOUND, 1, 1)
        assert made.pushed(0, 1).answer == ((0, 2),)
        assert made.pushed(0, 2).answer == ()
        assert made.rest(1).answer == ((0, 3),)
        assert made.pushed(1, 1).answer == ((1, 2),)  # it goes on

    def test_sync_is_finished_by_the_others(self) -> None:
        made = machine(SYNC, 1, 1)
        assert made.pushed(0, 1).apply == ()
        decision = made.rest(1)
        assert decision.apply == (0,)
        assert decision.answer == ((0, 2),)
        made.enter(1, 2)
        assert made.pushed(0, 2).apply == ()
        assert made.pushed(1, 2).apply == (0, 1)


def push(group: int, step: int, value: float, *, life: int = 0, torn: Sequence[tuple[int, int]] = (), piece: int = 0) -> Push:
    return Push(group, step, piece, 0, torch.tensor([value]), life=life, torn=tuple(torn))


def counted(batches: Sequence[Batch]) -> list[Any]:
    """(the piece, its gradient, or None if nothing counts, the groups that are answered) of each batch."""
    found = []
    for batch in batches:
        if not batch.updates:
            continue
        (update,) = batch.updates
        gradient = None if update.passed_over else update.gradient.item()
        found.append((update.piece, gradient, [group for group, _ in batch.answer]))
    return found


class TestTorn:
    """A worker is lost when one piece has its gradient and another has not: the batch counts once in each."""

    def test_async(self) -> None:
        made = Aggregator([0, 1], ASYNC, 2, sums=GroupSum)
        assert counted(made.pushed(push(1, 0, 5.0, life=9))) == [(0, 5.0, [1])]
        assert made.drop(1, 9) == []
        assert made.progress(9) == (0, 1)
        made.enter(0, 0)
        assert counted(made.pushed(push(0, 0, 5.0, torn=[(9, 0)]))) == [(0, None, [0])]
        assert counted(made.pushed(push(0, 0, 5.0, torn=[(9, 0)], piece=1))) == [(1, 5.0, [0])]

    def test_sync_means_those_that_count(self) -> None:
        made = Aggregator([0, 1], SYNC, 3, sums=GroupSum)
        for group, life in ((0, 7), (1, 8), (2, 9)):
            made.pushed(push(group, 0, 3.0, life=life))
        for group, life in ((0, 7), (1, 8)):
            assert counted(made.pushed(push(group, 0, 3.0, life=life, piece=1))) == []
        assert counted(made.drop(2, 9)) == [(1, 3.0, [0, 1])]
        assert made.progress(9) == (0, 1)
        made.pushed(push(0, 1, 4.0))
        assert counted(made.pushed(push(1, 1, 100.0, torn=[(9, 0)]))) == [(0, 4.0, [0, 1])]
        made.pushed(push(0, 1, 4.0, piece=1))
        assert counted(made.pushed(push(1, 1, 100.0, torn=[(9, 0)], piece=1))) == [(1, 52.0, [0, 1])]

    def test_what_had_arrived_of_a_synchronous_step_counts(self) -> None:
        made = Aggregator([0], SYNC, 2, sums=GroupSum)
        made.pushed(push(1, 0, 3.0, life=9))
        assert made.drop(1, 9) == []
        assert made.progress(9) == (1, 1)
        assert counted(made.pushed(push(0, 0, 1.0))) == [(0, 2.0, [0])]

    def test_the_one_who_takes_it_over_is_lost_as_well(self) -> None:
        made = Aggregator([0, 1], ASYNC, 3, sums=GroupSum)
        made.drop(1, 9)
        made.pushed(push(2, 0, 5.0, life=4, torn=[(9, 0)]))
        made.drop(2, 4)
        torn = [(9, 0), (4, 0)]
        assert counted(made.pushed(push(0, 0, 5.0, torn=torn))) == [(0, None, [0])]
        assert counted(made.pushed(push(0, 0, 5.0, torn=torn, piece=1))) == [(1, 5.0, [0])]

    def test_nothing_of_it_counts_in_a_step_of_its_own(self) -> None:
        made = Aggregator([0], SYNC, 2, sums=GroupSum)
        made.pushed(push(1, 0, 3.0, life=9))
        made.drop(1, 9)
        made.pushed(push(0, 0, 1.0))
        assert counted(made.pushed(push(0, 1, 3.0, torn=[(9, 0)]))) == [(0, None, [0])]

    def test_a_group_without_a_batch_is_answered_and_changes_nothing(self) -> None:
        made = Aggregator([0], SYNC, 3, sums=GroupSum)
        made.pushed(push(0, 0, 3.0))
        made.pushed(Push(1, 0, 0, 0, None, nothing=True))
        (batch,) = made.pushed(push(2, 0, 5.0))
        assert counted([batch]) == [(0, 4.0, [0, 1, 2])]
        assert batch.answer == ((0, 1), (1, 1), (2, 1))
        assert [counted(made.pushed(Push(group, 1, 0, 1, None, nothing=True))) for group in range(3)][2] == [(0, None, [0, 1, 2])]

    def test_a_life_that_was_never_here(self) -> None:
        assert Aggregator([0], SYNC, 2, sums=GroupSum).progress(9) is None


@pytest.mark.parametrize(
    "meta",
    [
        PushMeta(1, 2, None, False, 2**62, ()),
        PushMeta(1, 2, {"lr": 0.5}, True, 7, ((3, 4), (5, 6))),
        PushMeta(1, 2, None, False, 7, (), nothing=True),
    ],
)
def test_the_header_of_a_push_says_whose_it_is(meta: PushMeta) -> None:
    assert PushMeta.from_value(meta.to_value()) == meta
