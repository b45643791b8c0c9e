"""When two ends of a link know each other, and what a greeting means for a link that is there."""

from __future__ import annotations

from zmqtrain.net.greeting import Hello
from zmqtrain.net.handshake import Handshake, Judgement
from zmqtrain.net.settings import NetSettings

SETTINGS = NetSettings(hello_s=1.0, greet_s=10.0)


def hello_of(session: int, *, known: int = 0, process: int = 5, opened: bool = False) -> Hello:
    return Hello("b", "a", "memory://b", "", process, session, known, opened, 1 << 20, 1 << 20)


def test_a_link_opens_when_the_peer_knows_our_session() -> None:
    handshake = Handshake(SETTINGS, now=0.0)
    assert handshake.greet(hello_of(7))
    assert not handshake.opened
    assert handshake.greet(hello_of(7, known=handshake.session))
    assert handshake.opened
    assert not handshake.greet(hello_of(7, known=handshake.session, opened=True))


def test_a_peer_that_believes_in_an_earlier_session_is_shown_this_one() -> None:
    handshake = Handshake(SETTINGS, now=0.0)
    assert handshake.greet(hello_of(7, known=handshake.session + 2))
    assert handshake.remote is None


def test_what_another_end_of_the_peer_means() -> None:
    handshake = Handshake(SETTINGS, now=0.0)
    assert handshake.judge(hello_of(7)) is Judgement.CONTINUES
    handshake.greet(hello_of(7))
    assert handshake.judge(hello_of(7, known=3)) is Judgement.CONTINUES
    assert handshake.judge(hello_of(9, known=handshake.session + 2)) is Judgement.OUTDATED
    assert handshake.judge(hello_of(9)) is Judgement.REPLACED
    handshake.forget()
    handshake.greet(hello_of(9, known=handshake.session))
    assert handshake.judge(hello_of(11)) is Judgement.GIVEN_UP
    assert handshake.judge(hello_of(11, process=6)) is Judgement.RESTARTED
    assert handshake.judge(hello_of(11, process=6, known=handshake.session + 2)) is Judgement.OUTDATED


def test_greetings_are_repeated_less_and_less_often_until_the_link_is_open() -> None:
    handshake = Handshake(SETTINGS, now=0.0)
    assert not handshake.hello_due(0.0)
    handshake.link_up(1.0)
    times = []
    while len(times) < 6:
        (due,) = handshake.deadlines()
        assert not handshake.hello_due(due - 0.1)
        assert handshake.hello_due(due)
        times.append(due)
    assert times == [1.0, 2.0, 4.0, 8.0, 16.0, 24.0]
    handshake.greet(hello_of(7, known=handshake.session))
    assert handshake.deadlines() == []


def test_only_a_peer_that_is_waited_for_can_be_late() -> None:
    handshake = Handshake(SETTINGS, now=0.0)
    assert not handshake.late(100.0)
    handshake.demand(5.0)
    handshake.demand(9.0)
    assert handshake.deadlines() == [15.0]
    assert not handshake.late(14.9)
    assert handshake.late(15.0)
    handshake.greet(hello_of(7, known=handshake.session))
    assert not handshake.late(100.0)


def test_a_greeting_over_a_new_connection_must_be_answered() -> None:
    handshake = Handshake(SETTINGS, now=0.0)
    handshake.link_up(0.0)
    handshake.greet(hello_of(7, known=handshake.session))
    assert not handshake.unanswered(100.0)  # the first connection
    handshake.link_down()
    handshake.link_up(200.0)
    assert handshake.hello_due(200.0)
    assert handshake.deadlines() == [210.0]
    assert not handshake.unanswered(209.9)
    assert handshake.unanswered(210.0)
    handshake.greet(hello_of(7, known=handshake.session, opened=True))
    assert not handshake.unanswered(210.0)
    handshake.link_down()
    handshake.link_up(300.0)
    handshake.link_down()  # that it is lost is known then
    assert not handshake.unanswered(400.0)


def test_an_address_is_given_up_when_it_has_led_nowhere_for_a_while() -> None:
    handshake = Handshake(SETTINGS, now=0.0)
    assert handshake.gives_up_address("memory://b", 0.0)
    handshake.connect("memory://old", 1.0)
    assert not handshake.gives_up_address("memory://old", 100.0)
    assert not handshake.gives_up_address("memory://b", 4.9)
    assert handshake.gives_up_address("memory://b", 5.0)
    handshake.greet(hello_of(7, known=handshake.session))
    assert not handshake.gives_up_address("memory://b", 100.0)
