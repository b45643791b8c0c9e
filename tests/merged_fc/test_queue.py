"""Who is next on an FC server, and which gradients take effect."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import ProtocolError
from zmqtrain.merged_fc.queue import Applied, EvaluationTurn, FcQueue, Turn, WorkerPlace
from zmqtrain.server.staleness import Policy

ASYNC, SYNC = Policy("async"), Policy("sync")


def step_of(queue: FcQueue, group: int, step: int, size: int = 1) -> None:
    for position in range(size):
        queue.arrived(WorkerPlace(group, position), step, 0, 1)


def test_a_batch_is_complete_when_all_of_a_group_have_sent_their_parts() -> None:
    queue = FcQueue(2, 3, ASYNC)
    for place in (WorkerPlace(0, 1), WorkerPlace(1, 0), WorkerPlace(0, 0)):
        queue.arrived(place, 0, 0, 1)
    assert queue.next() is None
    queue.arrived(WorkerPlace(0, 2), 0, 0, 1)
    assert queue.next() == Turn(0, 0, 0, (0, 1, 2), last=True)
    assert queue.next() is None


def test_asynchronous_updates_are_at_once_and_never_stale() -> None:
    queue = FcQueue(3, 1, ASYNC)
    for group in (2, 0, 1):
        step_of(queue, group, 0)
    order = []
    for version in range(3):
        turn = queue.next()
        assert isinstance(turn, Turn)
        order.append(turn.group)
        assert queue.computed(turn) == Applied((turn.group,), (0,), (0,), "applied on arrival")
        assert queue.version == version + 1
    assert order == [2, 0, 1]


def test_synchronous_updates_are_of_all_groups() -> None:
    queue = FcQueue(2, 1, SYNC)
    step_of(queue, 1, 0)
    turn = queue.next()
    assert isinstance(turn, Turn)
    assert queue.computed(turn) is None
    step_of(queue, 0, 0)
    turn = queue.next()
    assert isinstance(turn, Turn)
    applied = queue.computed(turn)
    assert applied is not None
    assert (applied.groups, applied.steps, applied.staleness) == ((0, 1), (0, 0), (0, 0))


def test_nobody_waits_for_a_group_that_left() -> None:
    queue = FcQueue(2, 1, SYNC)
    step_of(queue, 0, 0)
    turn = queue.next()
    assert isinstance(turn, Turn)
    assert queue.computed(turn) is None
    applied = queue.left(1)
    assert applied is not None
    assert applied.groups == (0,)
    assert queue.left(1) is None
    assert list(queue.groups) == [0]


def test_the_turn_goes_to_who_waits_since_his_last_one() -> None:
    """A group that is always there again at once takes turns with the others."""
    queue = FcQueue(3, 1, ASYNC)
    steps, turns = [0, 0, 0], Counter[int]()
    for group in range(3):
        step_of(queue, group, 0)
    for _ in range(30):
        turn = queue.next()
        assert isinstance(turn, Turn)
        queue.computed(turn)
        turns[turn.group] += 1
        steps[turn.group] += 1
        step_of(queue, turn.group, steps[turn.group])
    assert set(turns.values()) == {10}


def test_evaluations_take_turns_with_groups() -> None:
    queue = FcQueue(1, 1, ASYNC)
    queue.asked("worker/0", 0)
    step_of(queue, 0, 0)
    assert queue.next() == EvaluationTurn("worker/0", 0)
    queue.asked("worker/0", 1)
    assert isinstance(queue.next(), Turn)
    assert queue.next() == EvaluationTurn("worker/0", 1)


def test_micro_batches_are_in_order_and_one_is_ahead() -> None:
    queue = FcQueue(2, 1, ASYNC)
    queue.arrived(WorkerPlace(0, 0), 0, 0, 3)
    queue.arrived(WorkerPlace(0, 0), 0, 1, 3)
    with pytest.raises(ProtocolError, match="before it had the gradients"):
        queue.arrived(WorkerPlace(0, 0), 0, 2, 3)
    first = queue.next()
    assert isinstance(first, Turn)
    assert (first.micro_batch, first.last) == (0, False)
    assert queue.computed(first) is None
    queue.arrived(WorkerPlace(0, 0), 0, 2, 3)
    # Another group's update comes between: what the first group computed before is stale by one.
    step_of(queue, 1, 0)
    other = queue.next()
    assert other == Turn(1, 0, 0, (0,), last=True)
    assert queue.computed(other) is not None  # type: ignore[arg-type]
    for micro_batch in (1, 2):
        turn = queue.next()
        assert isinstance(turn, Turn)
        assert (turn.micro_batch, turn.last) == (micro_batch, micro_batch == 2)
        applied = queue.computed(turn)
    assert applied is not None
    assert applied.staleness == (1,)


def test_workers_may_have_fewer_micro_batches_than_others() -> None:
    queue = FcQueue(1, 2, ASYNC)
    queue.arrived(WorkerPlace(0, 0), 0, 0, 2)
    queue.arrived(WorkerPlace(0, 0), 0, 1, 2)
    assert queue.next() is None
    queue.arrived(WorkerPlace(0, 1), 0, 0, 1)
    assert queue.next() == Turn(0, 0, 0, (0, 1), last=False)
    assert queue.next() == Turn(0, 0, 1, (0,), last=True)


@pytest.mark.parametrize(
    ("step", "micro_batch", "micro_batches", "said"),
    [
        (1, 0, 1, "expected: 0 of step 0"),
        (0, 1, 2, "expected: 0 of step 0"),
        (0, 0, 0, "has 0 micro-batches"),
        (0, 0, 1 << 20, "micro-batches"),
    ],
)
def test_what_is_not_due_is_refused(step: int, micro_batch: int, micro_batches: int, said: str) -> None:
    queue = FcQueue(1, 1, ASYNC)
    with pytest.raises(ProtocolError, match=said):
        queue.arrived(WorkerPlace(0, 0), step, micro_batch, micro_batches)
    step_of(queue, 0, 0)
    with pytest.raises(ProtocolError, match="expected: 0 of step 1"):
        step_of(queue, 0, 0)
    with pytest.raises(ProtocolError, match="before it had the gradients"):
        step_of(queue, 0, 1)


@given(st.lists(st.integers(0, 3), max_size=60), st.sampled_from([ASYNC, SYNC]))
def test_every_step_takes_effect_once_and_in_order(arrivals: list[int], policy: Policy) -> None:
    queue, sent, applied = FcQueue(4, 1, policy), [0] * 4, [0] * 4
    free = [True] * 4

    def compute() -> None:
        while (turn := queue.next()) is not None:
            assert isinstance(turn, Turn)
            update = queue.computed(turn)
            if update is not None:
                assert update.staleness == (0,) * len(update.groups)
                for group, step in zip(update.groups, update.steps, strict=True):
                    assert step == applied[group]
                    applied[group] += 1
                    free[group] = True

    for group in arrivals:
        if free[group]:
            step_of(queue, group, sent[group])
            sent[group] += 1
            free[group] = False
        compute()
    if policy is ASYNC:
        assert applied == sent
    else:
        assert applied == [min(sent)] * 4


# If workers may be lost.


def turn_of(queue: FcQueue, group: int, step: int, size: int = 1) -> Turn:
    """The turn of the group, which is the only one that waits."""
    step_of(queue, group, step, size)
    turn = queue.next()
    assert isinstance(turn, Turn)
    assert (turn.group, turn.step) == (group, step)
    return turn


def elastic(groups: int, size: int, policy: Policy) -> FcQueue:
    """Groups whose teams have the lives 10, 11, and so on."""
    queue = FcQueue(groups, size, policy)
    queue.begin({group: 10 + group for group in range(groups)})
    return queue


@pytest.mark.parametrize("computed", [False, True])
def test_what_was_computed_for_a_lost_group_counts_and_its_batch_does_not_count_again(computed: bool) -> None:
    queue = elastic(2, 1, ASYNC)
    queue.computed(turn_of(queue, 0, 0))
    turn = turn_of(queue, 1, 0)
    if computed:
        assert queue.computed(turn) is not None
    assert queue.drop(1) is None
    assert queue.progress(11) == ((1, 1) if computed else (0, 0))
    assert queue.progress(10) is None
    queue.arrived(WorkerPlace(0, 0), 1, 0, 1, torn=((11, 0),))
    again = queue.next()
    assert again == Turn(0, 1, 0, (0,), last=True, counts=not computed)
    assert isinstance(again, Turn)
    assert (queue.computed(again) is None) == computed
    assert queue.computed(turn_of(queue, 0, 2)) == Applied((0,), (2,), (0,), "applied on arrival")


def test_what_waits_for_the_others_counts_with_them_although_it_is_of_a_lost_group() -> None:
    queue = elastic(3, 1, SYNC)
    for group in (2, 0):
        assert queue.computed(turn_of(queue, group, 0)) is None
    assert queue.drop(2) is None
    applied = queue.computed(turn_of(queue, 1, 0))
    assert applied is not None
    assert (applied.groups, applied.steps) == ((0, 1, 2), (0, 0, 0))
    assert queue.enter(2, {0: 10, 1: 11, 2: 20}) == []
    for group in (0, 1):
        assert queue.computed(turn_of(queue, group, 1)) is None or group == 1
    assert [queue.life(group) for group in range(3)] == [10, 11, 20]
    for group in (0, 1):
        assert queue.computed(turn_of(queue, group, 2)) is None
    applied = queue.computed(turn_of(queue, 2, 2))
    assert applied is not None
    assert applied.groups == (0, 1, 2)


def test_a_group_that_sits_a_step_out_holds_nobody_up_and_counts_for_nothing() -> None:
    queue = elastic(3, 1, SYNC)
    assert queue.sit_out(2, 12, 0) is None
    assert queue.sit_out(2, 12, 0) is None  # another worker of its team says the same
    assert queue.computed(turn_of(queue, 0, 0)) is None
    applied = queue.computed(turn_of(queue, 1, 0))
    assert applied is not None
    assert (applied.groups, applied.steps) == ((0, 1), (0, 0))
    assert queue.sit_out(2, 99, 1) is None  # a team that is no more
    for group in (0, 1):
        assert queue.computed(turn_of(queue, group, 1)) is None
    applied = queue.computed(turn_of(queue, 2, 1))
    assert applied is not None
    assert applied.groups == (0, 1, 2)
    assert [queue.sit_out(group, 10 + group, 2) for group in range(3)] == [None] * 3
    assert queue.version == 2


def test_if_no_gradient_counts_there_is_no_update() -> None:
    queue = elastic(1, 1, SYNC)
    queue.computed(turn_of(queue, 0, 0))
    queue.enter(1, {0: 20})
    queue.arrived(WorkerPlace(0, 0), 1, 0, 1, torn=((10, 0),))
    turn = queue.next()
    assert isinstance(turn, Turn)
    assert queue.computed(turn) is None
    assert queue.version == 1


@pytest.mark.parametrize("computed", [False, True])
def test_a_team_that_follows_trains_the_step_that_was_given_up(computed: bool) -> None:
    """The others wait for it, and the batch counts once: as the team before had it computed, if it had."""
    queue = elastic(2, 2, SYNC)
    if computed:
        assert queue.computed(turn_of(queue, 1, 0, 2)) is None
    else:
        queue.arrived(WorkerPlace(1, 0), 0, 0, 1)  # the other one is lost
    queue.hold(1)
    assert queue.computed(turn_of(queue, 0, 0, 2)) is None or computed
    assert queue.life(1) is None
    queue.seat({1: (0,)})
    queue.follow(1, 20, 0)
    assert queue.enter(1, {0: 10, 1: 20}) == []
    with pytest.raises(ProtocolError, match="once more" if computed else "its next step is 0"):
        queue.arrived(WorkerPlace(1, 0), 2, 0, 1)
    queue.arrived(WorkerPlace(1, 0), 0, 0, 1)
    turn = queue.next()
    assert turn == Turn(1, 0, 0, (0,), last=True, counts=not computed)
    assert isinstance(turn, Turn)
    applied = queue.computed(turn)
    assert (applied is None) == computed
    assert queue.version == 1, "with both groups"
    queue.arrived(WorkerPlace(1, 0), 1, 0, 1)
    turn = queue.next()
    assert isinstance(turn, Turn)
    assert turn.counts


def test_a_group_that_follows_and_is_lost_as_a_whole_leaves_what_has_not_counted() -> None:
    queue = elastic(2, 2, SYNC)
    queue.computed(turn_of(queue, 1, 0, 2))
    queue.hold(1)
    queue.seat({1: (0,)})
    queue.follow(1, 20, 0)
    assert queue.drop(1) is None
    assert (queue.progress(11), queue.progress(20)) == ((1, 1), (1, 1))
    assert queue.computed(turn_of(queue, 0, 0, 2)) is not None


def test_evaluations_of_a_lost_worker_are_forgotten_and_others_do_not_wait_for_one_that_rests() -> None:
    queue = elastic(2, 1, SYNC)
    queue.asked("worker/1", 0)
    queue.forget("worker/1")
    assert queue.next() is None
    assert queue.computed(turn_of(queue, 0, 0)) is None
    applied = queue.rest(1)
    assert applied is not None
    assert applied.groups == (0,)
