"""When a link to a peer that is silent ends."""

from __future__ import annotations

import asyncio

import pytest

from zmqtrain.errors import PeerLostError
from zmqtrain.net.flags import BEYOND
from zmqtrain.net.greeting import Hello
from zmqtrain.net.link import ACK, BYE, PROBE, Link
from zmqtrain.net.mailbox import Mailbox
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.outbox import CONTROL, Outgoing
from zmqtrain.net.settings import NetSettings
from zmqtrain.wire.message import Header
from zmqtrain.wire.value import ValuePayload


@pytest.mark.virtual_time
@pytest.mark.parametrize(("ended", "after_s"), [(True, 0.3), (False, 10.0)], ids=["the process has ended", "the path is broken"])
async def test_when_a_silent_peer_is_lost(ended: bool, after_s: float) -> None:
    settings, network = NetSettings(gone_s=0.3, lost_s=10.0), MemoryNetwork()
    a, b = network.endpoint("a", settings), network.endpoint("b", settings)
    await b.send("a", ("x",), ValuePayload(1))
    await a.receive("b", ("x",))
    loop = asyncio.get_running_loop()
    began = loop.time()
    if ended:
        network.kill("b")
    else:
        network.partition(["a"], ["b"])
    with pytest.raises(PeerLostError):
        await a.receive("b", ("y",))
    assert loop.time() - began == pytest.approx(after_s)
    await a.close()


def open_link(settings: NetSettings) -> Link:
    link = Link("b", settings, Mailbox(), 0.0)
    hello = Hello(
        "b", "a", "memory://b", "", 1, 7, known=link.handshake.session, opened=True, control_window=1000, bulk_window=1000
    )
    link.link_up(0.0)
    link.greet(hello)
    return link


def test_what_an_ended_process_has_sent_still_arrives() -> None:
    link = open_link(NetSettings(gone_s=0.3, lost_s=10.0))
    link.link_down(1.0)
    link.gone(1.1)
    link.gone(1.2)  # each attempt to connect finds that out
    assert link.tick(1.39) is None
    assert link.receive(CONTROL, Header(ACK, acks=(0, 1000, 0, 1000)), 10, b"", 1.39) is None
    assert link.next_deadline() == pytest.approx(1.69)
    assert link.tick(1.6) is None
    farewell = link.receive(CONTROL, Header(BYE, meta=True), 10, b"", 1.65)
    assert farewell is not None
    assert not farewell.loss
    assert link.tick(1.96) == "gone"


def test_a_process_that_answers_again_has_not_ended() -> None:
    link = open_link(NetSettings(gone_s=0.3, lost_s=10.0))
    link.link_down(1.0)
    link.gone(1.1)
    link.link_up(1.2)
    link.link_down(1.3)
    assert link.tick(11.2) is None
    assert link.tick(11.3) == "lost"


def test_others_may_take_the_place_of_an_ended_process() -> None:
    link = open_link(NetSettings(lost_s=10.0))
    link.link_down(1.0)
    link.gone(1.1)
    assert link.next_deadline() == pytest.approx(11.0)


def request(number: int, meta: str = "") -> Outgoing:
    header = Header("value", ("@request", number, "add"), meta=meta)
    return Outgoing(header, (), exempt=True)


def send_all(link: Link, now: float) -> list[Header]:
    """The headers of all that the link passes on at ``now``."""
    sent = []
    while (parcel := link.next_parcel(CONTROL)) is not None:
        assert parcel.header is not None
        sent.append(parcel.header)
        link.parcel_sent(CONTROL, now)
    return sent


def test_a_request_is_asked_after_later_than_what_is_to_be_acknowledged_soon() -> None:
    link = open_link(NetSettings(probe_s=1.0, probe_later_s=15.0))
    link.outbox.put(request(1))
    send_all(link, 10.0)
    assert link.next_deadline() == 25.0
    link.outbox.put(Outgoing(Header("value", ("x",), meta=1), ()))
    send_all(link, 20.0)
    assert link.next_deadline() == 21.0  # not at once, although the request has been waiting for longer
    assert link.tick(21.0) is None
    assert [header.kind for _, header in link.take_notices()] == [PROBE]
    assert link.receive(CONTROL, Header(ACK, acks=(2, 1000, 0, 1000)), 10, b"", 21.1) is None
    assert link.next_deadline() is None


def test_a_request_is_acknowledged_with_its_answer_or_when_asked() -> None:
    link = open_link(NetSettings(probe_later_s=15.0))
    for sequence in range(2):
        header = Header("value", ("@request", 7, "add"), sequence, sequence + 1, flags=BEYOND, meta=[])
        assert link.receive(CONTROL, header, 50, b"", 1.0) is None
        assert not link.ack_due
    link.outbox.put(request(1))
    (header,) = send_all(link, 1.0)
    assert header.acks[0] == 2
    header = Header("value", ("@request", 7, "add"), 2, 3, flags=BEYOND, meta=[])
    assert link.receive(CONTROL, header, 50, b"", 1.0) is None
    assert link.receive(CONTROL, Header(PROBE, sequence=3), 10, b"", 2.0) is None
    assert link.ack_urgent
    assert [header.acks[0] for _, header in link.take_notices()] == [3]


def test_many_requests_without_an_answer_are_acknowledged_all_the_same() -> None:
    settings = NetSettings(inflight_messages=16, probe_later_s=15.0)
    link = open_link(settings)
    for sequence in range(4):
        assert not link.ack_due
        header = Header("value", ("@request", sequence, "add"), sequence, sequence + 1, flags=BEYOND, meta=[])
        assert link.receive(CONTROL, header, 50, b"", 1.0) is None
    assert link.ack_urgent
    assert [header.acks[0] for _, header in link.take_notices()] == [4]
