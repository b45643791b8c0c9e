"""Who may join: each row is a member's entry, what of the run matters, and the decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from zmqtrain.membership.join_decision import Circumstances, JoinMode, JoinRefused, decide_join
from zmqtrain.membership.state import Entry, Presence, State
from zmqtrain.membership.view import Member, MemberKind

BEFORE = Circumstances(
    state=State.JOINING,
    elastic=False,
    replaces_servers=False,
    replaces_fc=False,
    stopped=False,
    servers_have_ended=False,
    training_has_ended=False,
    agent=None,
    end_reason="",
)
RUNNING = replace(BEFORE, state=State.RUNNING)
ELASTIC = replace(RUNNING, elastic=True)


def entry(presence: Presence, kind: MemberKind = "worker", incarnation: int = 1) -> Entry:
    made = Entry(Member(f"{kind}/0", "h0", "", kind, 0), Counter(), presence)
    made.incarnation = incarnation
    return made


AGENT_ABSENT, AGENT_HERE = entry(Presence.ABSENT, "agent"), entry(Presence.HERE, "agent")


@pytest.mark.parametrize(
    ("member", "incarnation", "run", "decision"),
    [
        (entry(Presence.EXPECTED), 1, BEFORE, JoinMode.FIRST),
        (entry(Presence.HERE), 1, BEFORE, JoinMode.FIRST),  # it asks again
        (entry(Presence.HERE), 2, BEFORE, JoinMode.INSTEAD),
        (entry(Presence.HERE, "observer"), 2, RUNNING, JoinMode.INSTEAD),
        (entry(Presence.HERE), 1, ELASTIC, JoinMode.FIRST),
        (entry(Presence.HERE), 2, ELASTIC, JoinMode.LATE),
        (entry(Presence.LOST), 2, ELASTIC, JoinMode.LATE),
        (entry(Presence.LOST, "server"), 2, replace(ELASTIC, replaces_servers=True), JoinMode.LATE),
        (entry(Presence.ABSENT), 2, replace(ELASTIC, agent=AGENT_HERE), JoinMode.LATE),
        (entry(Presence.ABSENT), 2, ELASTIC, JoinMode.LATE),  # its host has no agent
    ],
)
def test_joins(member: Entry, incarnation: int, run: Circumstances, decision: JoinMode) -> None:
    assert decide_join(member, incarnation, run) is decision


@pytest.mark.parametrize(
    ("member", "run", "message", "is_lost"),
    [
        (entry(Presence.HERE), RUNNING, "came back as another process, and its state is lost", True),
        (entry(Presence.HERE, "server"), ELASTIC, "came back as another process, and its state is lost", True),
        (entry(Presence.LOST), RUNNING, "too late to join: the run was stopped", False),
        (entry(Presence.LOST), replace(RUNNING, state=State.FAILED, end_reason="why"), "too late to join: why", False),
        (entry(Presence.LOST), replace(ELASTIC, stopped=True), "too late to join", False),
        (entry(Presence.LOST), replace(ELASTIC, servers_have_ended=True), "too late to join: model servers have ended", False),
        (entry(Presence.LEFT), ELASTIC, "too late to join: it has left already", False),
        (entry(Presence.LOST), replace(ELASTIC, training_has_ended=True), "too late to join: the run had ended", False),
        (entry(Presence.LOST), replace(ELASTIC, training_has_ended=True, state=State.ENDED), "the run had ended", False),
        (entry(Presence.ABSENT), BEFORE, "may join once all members with which the run begins have joined", False),
        (entry(Presence.ABSENT), replace(ELASTIC, agent=AGENT_ABSENT), "agent/0 has not joined", False),
        (entry(Presence.LEFT, incarnation=2), RUNNING, "has left already", False),
    ],
)
def test_is_refused(member: Entry, run: Circumstances, message: str, is_lost: bool) -> None:
    refusal = decide_join(member, 2, run)
    assert isinstance(refusal, JoinRefused)
    assert message in str(refusal.error)
    assert refusal.is_lost is is_lost
