"""Who computes on a slot that several workers share."""

from __future__ import annotations

import pytest

from zmqtrain.errors import ProtocolError
from zmqtrain.train.mutex import Mutex


def test_turns_are_given_in_the_order_of_asking() -> None:
    mutex = Mutex(("a", "b", "c"))
    assert mutex.asked("b") == "b"
    assert mutex.asked("c") is None
    assert mutex.asked("a") is None
    assert mutex.given_back("b") == "c"
    assert mutex.asked("b") is None
    assert [mutex.given_back("c"), mutex.given_back("a"), mutex.given_back("b")] == ["a", "b", None]
    assert mutex.holder is None


def test_who_may_not_ask_or_give_back_is_told() -> None:
    mutex = Mutex(("a", "b"))
    mutex.asked("a")
    mutex.asked("b")
    for member in ("a", "b", "x"):
        with pytest.raises(ProtocolError, match=f"{member} may not ask"):
            mutex.asked(member)
    with pytest.raises(ProtocolError, match="b gives back a turn that it does not have: a has it"):
        mutex.given_back("b")
    mutex.given_back("a")
    mutex.given_back("b")
    with pytest.raises(ProtocolError, match="no member has the turn"):
        mutex.given_back("b")
