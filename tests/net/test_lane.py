from __future__ import annotations

import pytest

from zmqtrain.errors import WireError
from zmqtrain.net.lane import ReceiveLane, SendLane, Verdict


def lane(pieces: int) -> SendLane[str]:
    sending: SendLane[str] = SendLane()
    for _ in range(pieces):
        sending.add((), 10, "owner")
        sending.advance()
    return sending


def test_late_pieces_may_be_acknowledged_after_going_back() -> None:
    sending = lane(6)
    sending.resume(2)
    sending.advance()  # piece 2 goes again ...
    assert sending.transmitted == 3
    done = sending.acknowledge(5)  # ... but 2 to 4 had only been late
    assert [parcel.sequence for parcel in done] == [0, 1, 2, 3, 4]
    again = sending.peek()
    assert again is not None
    assert again.sequence == 5
    assert sending.inflight_bytes == 10
    sending.advance()
    assert sending.transmitted == 6
    assert sending.peek() is None


def test_what_was_never_sent_cannot_be_acknowledged() -> None:
    sending = lane(3)
    sending.add((), 10, "owner")  # not handed over
    sending.resume(0)
    with pytest.raises(WireError, match="piece 3 was acknowledged, but only 3 were sent"):
        sending.acknowledge(4)
    assert len(sending.acknowledge(3)) == 3


def test_pieces_are_taken_once_and_in_order() -> None:
    receiving = ReceiveLane()
    judged = [receiving.judge(sequence) for sequence in (0, 1, 3, 4, 2, 1, 3)]
    take, repeated, gap, new = Verdict.TAKE, Verdict.REPEATED, Verdict.GAP, Verdict.NEW_GAP
    assert judged == [take, take, new, gap, take, repeated, take]


def test_what_may_be_acknowledged_later_hurries_nobody() -> None:
    sending = lane(1)
    assert sending.hurried
    assert not sending.unhurried
    sending.acknowledge(1)
    sending.add((), 10, "owner", hurried=False)
    assert not sending.hurried
    assert sending.unhurried
    sending.add((), 10, "owner")
    assert sending.hurried
    assert sending.hurried_from == 2  # since when something is overdue counts from here
    sending.add((), 10, "owner", hurried=False)
    assert sending.unhurried
    for _ in range(3):
        sending.advance()
    sending.acknowledge(3)
    assert not sending.hurried
    sending.hurry()
    assert sending.hurried
    assert not sending.unhurried
    sending.acknowledge(4)
    assert not sending.hurried
