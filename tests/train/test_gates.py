"""Gates between the compute thread and the loop's, with a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zmqtrain.errors import PeerLostError, PeerTimeoutError
from zmqtrain.train.gates import Gate, Gates


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
def gates(waiting: Waiting) -> Gates:
    return Gates(3, 5.0, condition=waiting, clock=lambda: waiting.now)


def test_an_open_gate_takes_no_time(gates: Gates) -> None:
    assert [gates.take(index) for index in range(len(gates))] == [0.0] * 3


def test_a_closed_gate_takes_the_time_until_the_bucket_arrives(gates: Gates, waiting: Waiting) -> None:
    gates.close(1)
    waiting.meanwhile = lambda: gates.arrive(1)
    assert gates.take(1) == 0.25
    assert gates.state(1) is Gate.OPEN
    assert waiting.notified == 1


def test_what_arrived_before_takes_no_time(gates: Gates) -> None:
    gates.close(2)
    gates.arrive(2)
    assert gates.state(2) is Gate.ARRIVED
    assert gates.take(2) == 0.0


def test_another_bucket_opens_nothing(gates: Gates, waiting: Waiting) -> None:
    gates.close(0)
    gates.close(1)
    waiting.meanwhile = lambda: gates.arrive(1)
    with pytest.raises(PeerTimeoutError, match="the parameters of bucket 0"):
        gates.take(0)


def test_aborting_ends_waits_now_and_later(gates: Gates, waiting: Waiting) -> None:
    gates.close(0)
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
