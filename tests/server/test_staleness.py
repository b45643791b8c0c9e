"""The staleness policies, for every order of pushes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.server.staleness import DuplicatePushError, OutOfOrderPushError, Policy, StalenessMachine, UnknownGroupError


def test_async_answers_at_once() -> None:
    machine = StalenessMachine(Policy("async"), range(2))
    for step in range(3):
        decision = machine.pushed(1, step)
        assert (decision.apply, decision.answer, decision.reason) == ((1,), ((1, step + 1),), "applied on arrival")


def test_sync_applies_once_all_are_there_in_the_order_of_groups() -> None:
    machine = StalenessMachine(Policy("sync"), range(3), first_step=7)
    assert machine.pushed(2, 7).reason == "waiting for the gradients of groups [0, 1]"
    assert machine.pushed(0, 7).apply == ()
    decision = machine.pushed(1, 7)
    assert decision.apply == (0, 1, 2)
    assert decision.answer == ((0, 8), (1, 8), (2, 8))


def test_sync_goes_on_without_groups_that_left() -> None:
    machine = StalenessMachine(Policy("sync"), range(3))
    machine.pushed(1, 0)
    assert machine.left(0).apply == ()
    decision = machine.pushed(2, 0)
    assert (decision.apply, decision.answer) == ((1, 2), ((1, 1), (2, 1)))
    machine.pushed(1, 1)
    decision = machine.left(2)
    assert (decision.apply, decision.answer) == ((1,), ((1, 2),))
    assert machine.left(2).apply == ()


def test_sync_keeps_the_gradient_of_a_group_that_left_after_its_push() -> None:
    machine = StalenessMachine(Policy("sync"), range(2))
    machine.pushed(0, 0)
    machine.left(0)
    decision = machine.pushed(1, 0)
    assert (decision.apply, decision.answer) == ((0, 1), ((1, 1),))


def test_the_bound_holds_back_who_is_too_far_ahead_and_no_longer() -> None:
    machine = StalenessMachine(Policy("bound", 1), range(2))
    assert machine.pushed(0, 0).answer == ((0, 1),)
    decision = machine.pushed(0, 1)
    assert (decision.apply, decision.answer) == ((0,), ())
    assert decision.reason == "group 0 is 2 steps ahead of group 1; 1 are allowed"
    assert machine.pushed(1, 0).answer == ((0, 2), (1, 1))


def test_a_group_that_left_holds_nobody_back() -> None:
    machine = StalenessMachine(Policy("bound", 0), range(3))
    machine.pushed(0, 0)
    machine.pushed(1, 0)
    decision = machine.left(2)
    assert decision.answer == ((0, 1), (1, 1))
    assert decision.reason == "group 2 left"


def test_a_push_that_may_not_be_changes_nothing() -> None:
    machine = StalenessMachine(Policy("async"), range(2))
    machine.pushed(0, 0)
    with pytest.raises(DuplicatePushError, match=r"group 0 has already pushed step 0; its next step is 1"):
        machine.pushed(0, 0)
    with pytest.raises(OutOfOrderPushError, match="group 0 pushed step 2, but its next step is 1"):
        machine.pushed(0, 2)
    with pytest.raises(UnknownGroupError, match=r"there is no group 2 here; these groups train: \[0, 1\]"):
        machine.pushed(2, 0)
    assert machine.pushed(0, 1).answer == ((0, 2),)


@given(st.integers(1, 5), st.integers(0, 3), st.integers(1, 8), st.randoms(use_true_random=False), st.booleans())
def test_no_read_is_staler_than_the_bound(groups: int, bound: int, steps: int, chance: random.Random, leaving: bool) -> None:
    machine = StalenessMachine(Policy("bound", bound), range(groups))
    pushed = dict.fromkeys(range(groups), 0)
    reading = set(pushed)  # groups that have parameters and compute
    leaver = groups - 1 if leaving and groups > 1 else None
    while any(count < steps for count in pushed.values()):
        able = sorted(group for group in reading if pushed[group] < steps)
        assert able, "somebody can always go on: the slowest is never held back"
        group = chance.choice(able)
        if group == leaver and chance.random() < 0.3:
            decision = machine.left(group)
            del pushed[group]
            reading.discard(group)
            leaver = None
        else:
            decision = machine.pushed(group, pushed[group])
            assert decision.apply == (group,)
            pushed[group] += 1
            reading.discard(group)
        for other, step in decision.answer:
            assert step == pushed[other]
            assert step - min(pushed.values()) <= bound, "the read lacks at most `bound` steps of the slowest group"
            reading.add(other)
        for other in pushed.keys() - reading:
            assert pushed[other] - min(pushed.values()) > bound, f"group {other} waits although it need not"


@given(st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_sync_applies_every_gradient_once(groups: int, steps: int, chance: random.Random) -> None:
    machine = StalenessMachine(Policy("sync"), range(groups))
    applied: list[int] = []
    for step in range(steps):
        order = list(range(groups))
        chance.shuffle(order)
        decisions = [machine.pushed(group, step) for group in order]
        assert all(not decision.apply for decision in decisions[:-1])
        applied += decisions[-1].apply
    assert applied == list(range(groups)) * steps


def test_a_group_that_is_to_enter_does_so_when_the_last_of_the_others_rests() -> None:
    machine = StalenessMachine(Policy("sync"), [1, 2], first_step=14)
    assert machine.enter(0, 15).entered == ()
    assert machine.rest(1).entered == ()
    decision = machine.rest(2)  # without a gradient that would let it in
    assert (decision.apply, decision.entered) == ((), (0,))
    assert machine.expected(0) == 15


@pytest.mark.parametrize("policy", [Policy("async"), Policy("sync"), Policy("bound", 1)])
def test_a_group_may_go_on_where_a_change_begins_but_skips_nothing_else(policy: Policy) -> None:
    machine = StalenessMachine(policy, [0, 1])
    for group in (0, 1):
        machine.pushed(group, 0)
        machine.enter(group, 3)
        machine.enter(group, 5)
    copy = StalenessMachine(policy, [])
    copy.load(machine.state())
    for step in (2, 4, 6):
        with pytest.raises(OutOfOrderPushError, match=f"pushed step {step}, but its next step is 1"):
            copy.pushed(0, step)
    copy.pushed(0, 3)
    assert (copy.clock(0), copy.clock(1)) == (4, 1)
    with pytest.raises(DuplicatePushError):
        copy.pushed(0, 3)
    copy.left(0)
    with pytest.raises(UnknownGroupError):
        copy.pushed(0, 5)
