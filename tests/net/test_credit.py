from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import WireError
from zmqtrain.net.credit import Allowance, Window


def test_a_sender_stops_when_the_window_is_full() -> None:
    window, allowance = Window(100), Allowance()
    allowance.grant(window.announce())
    allowance.spend(60)
    assert allowance.open
    allowance.spend(60)  # a piece may begin while any credit is left
    assert not allowance.open
    window.arrive(60)
    window.arrive(60)
    window.consume(60)
    assert window.due
    allowance.grant(window.announce())
    assert allowance.open
    allowance.grant(10)  # an older grant that comes late
    assert allowance.open


def test_a_sender_without_credit_is_found_out() -> None:
    window = Window(100)
    window.announce()
    window.arrive(100)
    with pytest.raises(WireError, match="without credit"):
        window.arrive(1)


@given(st.integers(1, 50), st.lists(st.integers(1, 80), max_size=40), st.data())
def test_memory_is_bounded_and_everything_goes(size: int, pieces: list[int], data: st.DataObject) -> None:
    window, allowance = Window(size), Allowance()
    allowance.grant(window.announce())
    held: list[int] = []
    waiting = list(pieces)
    while waiting or held:
        if waiting and allowance.open and (not held or data.draw(st.booleans())):
            piece = waiting.pop(0)
            allowance.spend(piece)
            window.arrive(piece)
            held.append(piece)
            assert window.held < size + max(pieces)
        else:
            assert held, "there is credit whenever nothing is held"
            window.consume(held.pop(0))
            if window.due or not held:
                allowance.grant(window.announce())
