"""Who computes on a slot that several workers share."""

from __future__ import annotations

import pytest

from zmqtrain.errors import ProtocolError
from zmqtrain.train.turns import Turns


def test_turns_are_given_in_the_order_of_asking() -> None:
    turns = Turns(("a", "b", "c"))
    assert turns.asked("b") == "b"
    assert turns.asked("c") is None
    assert turns.asked("a") is None
    assert turns.given_back("b") == "c"
    assert turns.asked("b") is None
    assert [turns.given_back("c"), turns.given_back("a"), turns.given_back("b")] == ["a", "b", None]
    assert turns.holder is None


def test_who_may_not_ask_or_give_back_is_told() -> None:
    turns = Turns(("a", "b"))
    turns.asked("a")
    turns.asked("b")
    for member in ("a", "b", "x"):
        with pytest.raises(ProtocolError, match=f"{member} may not ask"):
            turns.asked(member)
    with pytest.raises(ProtocolError, match="b gives back a turn that a has"):
        turns.given_back("b")
    turns.given_back("a")
    turns.given_back("b")
    with pytest.raises(ProtocolError, match="that nobody has"):
        turns.given_back("b")
