"""Gates between the compute thread and the loop's, with a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zmqtrain.errors import PeerLostError, PeerTimeoutError
from zmqtrain.train.bucket_machine import BucketMachine, Do, State
from zmqtrain.train.gates import Gates


class Waiting:
    """A condition whose wait is what the test says: time passes, and somebody does something."""

    def __init__(self) -> None:
        self.now, self.notified = 0.0, 0
        self.meanwhile: Callable[[], None] = lambda: None

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        self.now += 0.25
        self.meanwhile()
        return predicate()

    def notify_all(self) -> None:
        self.notified += 1


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


@pytest.fixture
def machine() -> BucketMachine:
    """Its three buckets are the exchange's."""
    machine = BucketMachine(["a", "b", "c"])
    machine.begin_backward(last=True)
    machine.end_backward()
    machine.hand_over()
    return machine


@pytest.fixture
def gates(machine: BucketMachine, waiting: Waiting) -> Gates:
    return Gates(machine, 5.0, condition=waiting, clock=lambda: waiting.now)


def test_an_open_gate_takes_no_time(gates: Gates, waiting: Waiting) -> None:
    gates.all_answered()
    assert [gates.take(index) for index in range(3)] == [([Do.FETCH, Do.FORGET], 0.0)] * 3
    assert [gates.take(index) for index in range(3)] == [((), 0.0)] * 3
    assert waiting.now == 0.0


def test_a_closed_gate_takes_the_time_until_the_answer(gates: Gates, machine: BucketMachine, waiting: Waiting) -> None:
    waiting.meanwhile = lambda: gates.answered(1)
    assert gates.take(1) == ([Do.FETCH, Do.FORGET], 0.25)
    assert machine.state(1) is State.OPEN
    assert waiting.notified == 1


def test_what_was_answered_before_takes_no_time(gates: Gates, machine: BucketMachine) -> None:
    gates.answered(2)
    assert machine.state(2) is State.ANSWERED
    assert gates.take(2)[1] == 0.0


def test_another_bucket_opens_nothing(gates: Gates, waiting: Waiting) -> None:
    waiting.meanwhile = lambda: gates.answered(1)
    with pytest.raises(PeerTimeoutError, match=r"the exchange.*the parameters of bucket 0"):
        gates.take(0)


def test_aborting_ends_waits_now_and_later(gates: Gates, waiting: Waiting) -> None:
    first, second = (
        PeerLostError("worker/1", "gone", waiting_for="a bucket"),
        PeerLostError("worker/2", "gone", waiting_for="a bucket"),
    )

    def lost() -> None:
        gates.abort(first)
        gates.abort(second)

    waiting.meanwhile = lost
    for index in range(3):
        with pytest.raises(PeerLostError) as caught:
            gates.take(index)
        assert caught.value is first
    assert waiting.notified == 2
