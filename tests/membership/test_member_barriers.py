"""Barriers and agreements of members: who may call them."""

from __future__ import annotations

from zmqtrain.membership.actions import Action, Answer, Refuse
from zmqtrain.membership.barrier import Barriers
from zmqtrain.membership.member_barriers import MemberBarriers
from zmqtrain.membership.state import MemberTable, Presence
from zmqtrain.membership.view import Member


def meetings_of(count: int = 3) -> tuple[MemberTable, MemberBarriers]:
    members = MemberTable(Member(f"worker/{rank}", "h0", "", "worker", rank) for rank in range(count))
    for entry in members:
        entry.welcome(1, "")
    return members, MemberBarriers(members, Barriers(10.0))


def errors(actions: list[Action]) -> list[str]:
    return [str(action.error) for action in actions if isinstance(action, Refuse)]


def test_all_workers_are_those_that_are_there_in_an_elastic_run() -> None:
    members, meeting = meetings_of()
    lost = members.get("worker/2")
    assert lost is not None
    lost.presence = Presence.LOST
    for elastic, answered in ((True, [0, 1]), (False, [])):
        for rank in range(2):
            actions = meeting.reach(f"worker/{rank}", f"end {elastic}", None, rank, 0.0, version=2, elastic=elastic)
        assert [action.ticket for action in actions if isinstance(action, Answer)] == answered
        assert bool(errors(actions)) is not elastic


def test_members_of_a_barrier_are_members_of_the_run() -> None:
    _, meeting = meetings_of()
    for who, why in (
        (["worker/0", "worker/9"], "with worker/9, not part of this run"),
        (["worker/1"], "without being one of its members"),
    ):
        (error,) = errors(meeting.reach("worker/0", "end", who, 1, 0.0, version=1, elastic=False))
        assert error == f"worker/0 calls the barrier 'end' {why}"


def test_an_agreement_about_an_older_view_is_refused_and_others_get_the_largest_value() -> None:
    _, meeting = meetings_of()
    who = ["worker/0", "worker/1"]
    (error,) = errors(meeting.agree("worker/0", "step", 3, who, 1, 0.0, version=1, newest=2))
    assert error == "the members have changed: view 2 is the newest, not 1"
    assert meeting.agree("worker/0", "step", 3, who, 2, 0.0, version=2, newest=2) == []
    answers = meeting.agree("worker/1", "step", 7, who, 3, 0.0, version=None, newest=2)
    assert [action.value for action in answers if isinstance(action, Answer)] == [7, 7]
