"""Who trains which batches when workers are lost and others come: tables, and random histories against a plain account."""

from __future__ import annotations

import random

import pytest

from zmqtrain.data.slots import Life, Slot, SlotPlan, lives_after
from zmqtrain.errors import ProtocolError

A, B, C = ("worker/0", 1), ("worker/1", 2), ("worker/2", 3)


def numbers(plan: SlotPlan, step: int, *lives: Life) -> list[int | None]:
    return [None if (slot := plan.slot(step, life)) is None else slot.number for life in lives]


def test_without_a_loss_each_group_takes_its_own_batch_of_each_step() -> None:
    plan = SlotPlan([A, B, C])
    assert [numbers(plan, step, A, B, C) for step in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert plan.slot(1, B) == Slot(4)
    assert Slot(4).place(3) == (1, 1)


def test_what_a_lost_worker_has_left_comes_first() -> None:
    plan = SlotPlan([A, B, C])
    plan.change(4, [A, C], {B: (2, 2)})  # it has trained steps 0 and 1; the others have begun step 3
    assert plan.eras[-1].left == (Slot(7), Slot(10))
    assert [numbers(plan, step, A, B, C) for step in (3, 4, 5)] == [[9, 10, 11], [7, None, 10], [12, None, 13]]


def test_a_torn_batch_names_all_who_have_begun_it() -> None:
    plan = SlotPlan([A, B, C])
    plan.change(4, [A, C], {B: (2, 3)})
    assert plan.slot(4, A) == Slot(7, ((2, 2),))
    plan.change(5, [C], {A: (4, 5)})
    assert plan.slot(5, C) == Slot(7, ((2, 2), (1, 4)))


def test_who_has_nothing_in_a_step_that_others_train_sits_it_out() -> None:
    plan = SlotPlan([A, B, C])
    plan.total = 8
    assert [plan.sits_out(step, C) for step in range(4)] == [False, False, True, False]
    assert not plan.sits_out(2, A)
    assert not plan.sits_out(2, ("worker/2", 4))  # another process, which has no part in it


def test_what_was_pushed_in_a_step_that_was_sat_out_counts_for_no_batch() -> None:
    plan = SlotPlan([A, B, C])
    plan.steps = 4
    plan.change(4, [A, C], {B: (3, 4)})  # only what is torn is trained after the last step
    assert [plan.sits_out(4, life) for life in (A, C)] == [False, True]
    plan.change(5, [A], {C: (4, 5)})
    assert plan.slot(5, A) is None


def test_nobody_has_a_part_in_steps_before_those_of_the_plan() -> None:
    """As in a run that is resumed where it had ended, after losses."""
    plan = SlotPlan([A, B], since=10, first=15, left=[Slot(12), Slot(13), Slot(14)])
    plan.steps = 10
    assert [numbers(plan, step, A, B) for step in (0, 9, 10)] == [[None, None]] * 3
    assert not plan.sits_out(9, A)
    assert plan.turn(10, B) == Slot(13)


def test_a_change_before_any_step_of_the_last_one_replaces_it() -> None:
    plan = SlotPlan([A, B, C])
    plan.change(4, [A, C], {B: (3, 3)})
    plan.change(4, [A], {B: (3, 3), C: (4, 4)})
    assert [numbers(plan, step, A) for step in (4, 5, 6)] == [[10], [12], [13]]
    assert [era.since for era in plan.eras] == [0, 4]


@pytest.mark.parametrize(("total", "end", "last"), [(12, 5, [11, None]), (13, 5, [11, 12]), (9, 3, [None, None])])
def test_training_ends_when_no_slot_is_left(total: int, end: int, last: list[int | None]) -> None:
    plan = SlotPlan([A, B, C])
    plan.total = total
    assert plan.end == -(-total // 3)
    plan.change(3, [A, C], {B: (3, 3)})
    assert plan.end == end
    assert numbers(plan, 4, A, C) == last


def test_after_the_last_step_only_torn_batches_are_trained() -> None:
    plan = SlotPlan([A, B, C])
    plan.steps = 4
    assert plan.end == 4
    plan.change(4, [A, C], {B: (2, 3)})
    assert plan.end == 5
    assert [numbers(plan, step, A, C) for step in (4, 5)] == [[7, None], [None, None]]


@pytest.mark.parametrize("seed", range(20))
def test_each_slot_is_trained_once_whatever_happens(seed: int) -> None:
    """Workers at steps of their own, some lost in the middle of one, others in their place: all that ends is trained once."""
    draw, groups, total = random.Random(seed), 4, 60
    plan = SlotPlan([(f"worker/{rank}", rank) for rank in range(groups)])
    plan.total = total
    at = dict.fromkeys(plan.eras[0].members, 0)
    trained: list[int] = []
    progress: dict[Life, tuple[int, int]] = {}
    fresh = groups

    def train(life: Life) -> bool:
        slot = plan.slot(at[life], life)
        if slot is None and plan.eras[-1].since > at[life]:
            at[life] = plan.eras[-1].since
            slot = plan.slot(at[life], life)
        if slot is None:
            return False
        trained.append(slot.number)
        at[life] += 1
        return True

    for _ in range(6):
        for _ in range(draw.randrange(20)):
            train(draw.choice(list(at)))
        lost = draw.sample(list(at), draw.randrange(len(at)))
        for life in lost:
            done = at.pop(life)
            torn = plan.slot(done, life) is not None and draw.random() < 0.5
            progress[life] = (done, done + torn)
        came = [(peer, (fresh := fresh + 1)) for peer, _ in lost if draw.random() < 0.5]
        since = max([0, plan.eras[-1].since, *at.values(), *(high for _, high in progress.values())])
        members = sorted([*at, *came])
        plan.change(since, members, progress)
        at |= dict.fromkeys(came, since)
    while [life for life in list(at) if train(life)]:
        pass
    assert sorted(trained) == list(range(total))


def test_a_worker_that_joins_has_the_plan_of_the_others() -> None:
    plan = SlotPlan([A, B, C])
    plan.change(4, [A, C], {B: (2, 3)})
    plan.change(6, [A, C, ("worker/1", 9)], {})
    plan.go_on_without(8, [A, C], [(7, False)])
    copied = SlotPlan.from_value(plan.to_value())
    assert (copied.eras, copied.handed_on) == (plan.eras, {("worker/1", 9): 7})
    for wrong in ([], None, [[1, []], []], [[[0, [], 0, []]], []], [[[0, [["worker/0", 1]], 0, [[1, 2]]]], []], "worker"):
        with pytest.raises(ProtocolError, match="does not say who trains which batches"):
            SlotPlan.from_value(wrong)


def test_what_is_done_is_what_was_taken_but_for_what_is_left() -> None:
    plan = SlotPlan([A, B, C])
    assert [plan.done(step) for step in range(3)] == [0, 3, 6]
    plan.change(4, [A, C], {B: (2, 2)})  # of which the batches of two steps are left
    assert [plan.done(step) for step in (4, 5, 6)] == [10, 12, 14]
    plan.total = 13
    assert [plan.done(step) for step in (5, 6, 7)] == [12, 13, 13]
    assert [plan.first_step(life) for life in (A, B)] == [0, 0]
    plan.change(6, [C, ("worker/1", 9)], {A: (6, 6)})
    assert plan.first_step(("worker/1", 9)) == 6


def test_what_only_a_lost_worker_had_of_another_one_is_left_again() -> None:
    plan = SlotPlan([A, B, C])
    plan.go_on_without(4, [A, C], [(3, False)])  # of B the steps 0 to 2 are in the model of A or C
    assert (plan.eras[-1].left, plan.handed_on) == ((Slot(10),), {B: 3})
    assert plan.lost([A]) == [B, C]
    plan.go_on_without(4, [A], [(1, True), (4, True)])  # it was that of C, which has no more than step 0 of it
    assert [slot.number for slot in plan.eras[-1].left] == [4, 7, 10]
    assert plan.handed_on == {}


def test_of_one_that_has_done_nothing_all_is_left() -> None:
    plan = SlotPlan([A, B, C])
    plan.go_on_without(2, [A, C], [(0, False)])
    assert ([slot.number for slot in plan.eras[-1].left], plan.handed_on) == ([1, 4], {})
    plan.go_on_without(1, [A], [(9, True)])  # not before the last change, and what nobody has begun is not done
    assert (plan.eras[-1].since, len(plan.eras)) == (2, 2)


def test_a_group_that_goes_on_takes_the_turns_that_it_had() -> None:
    plan = SlotPlan([A, B, C])
    here: list[tuple[str, int | None]] = [("worker/0", None), ("worker/2", 8)]  # of the last one nobody is there who was before
    lives = lives_after(plan.eras[-1].members, here)
    assert lives == [A, ("worker/2", 8)]
    assert plan.lost(lives) == [B, C]
    plan.go_on_without(2, lives, [(1, True), (2, True)])
    assert [slot.number for slot in plan.eras[-1].left] == [4]
    assert numbers(plan, 2, *lives) == [4, 6]


def test_so_many_are_taken_in_a_step_as_have_a_slot() -> None:
    draw = random.Random(5)
    for _ in range(40):
        plan = SlotPlan([A, B, C], since=(since := draw.choice([0, 2])), first=3 * since)
        plan.total, plan.steps = draw.choice([None, 11, 14, 30]), draw.choice([None, None, 5])
        plan.change(3, [A, C], {B: (1, draw.choice([1, 2]))})
        plan.change(6, [C], {})
        for step in range(16):
            members = plan.at(step).members
            assert plan.taken(step) == sum(plan.slot(step, life) is not None for life in members)
