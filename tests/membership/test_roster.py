"""The coordinator's decisions, without a loop."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.membership.table import TIMEOUTS, Table, members
from zmqtrain.errors import HostLostError, PeerLostError, PeerTimeoutError, ProtocolError, TaskError, UsageError
from zmqtrain.membership.actions import Note
from zmqtrain.membership.barrier import name_some
from zmqtrain.membership.roster import MOST_OBSERVERS
from zmqtrain.membership.state import TRANSITIONS, State
from zmqtrain.membership.view import Member, View


def test_roles_wait_for_the_complete_view_and_agents_do_not() -> None:
    table = Table(members())
    agent, first, second = table.join("agent/h0"), table.join("worker/0"), table.join("worker/1")
    assert set(table.answers) == {agent}
    third = table.join("server/0")
    assert set(table.answers) == {agent, first, second, third}
    view = View.from_value(table.answers[first])
    assert view.complete
    assert view.members["worker/1"] == Member("worker/1", "tcp://worker/1", "h0", "worker", 1, 0, 1, incarnation=1)
    assert view.version > View.from_value(table.answers[agent]).version
    assert table.roster.state is State.RUNNING


def test_an_agent_is_told_of_the_others_only_when_all_have_joined() -> None:
    """To tell each of a thousand agents of all that have come before it would take minutes."""
    table = Table(members(workers=4, servers=0, hosts=2))
    table.join("worker/0")
    assert [each["peer"] for each in table.answers[table.join("agent/h0")]["members"]] == ["agent/h0"]
    assert [each["peer"] for each in table.answers[table.join("agent/h1")]["members"]] == ["agent/h1"]
    table.join_all()
    assert len(table.answers[table.join("agent/h1")]["members"]) == 6


def test_all_who_waited_for_the_view_get_one_object() -> None:
    """Which is packed once."""
    table = Table(members(workers=4, servers=0))
    tickets = table.join_all()
    views = [table.answers[ticket] for ticket in tickets[1:]]
    assert all(view is views[0] for view in views)


def test_a_heartbeat_that_a_join_has_overtaken_does_not_lose_the_role() -> None:
    table = Table(members())
    table.join_all()
    table.take(table.roster.handle_heartbeat("agent/h0", ["worker/0", "server/0"], table.now))  # made before worker/1 was started
    table.take(table.roster.handle_heartbeat("agent/h0", ["worker/0", "worker/1", "server/0"], table.now))
    assert table.roster.state is State.RUNNING
    for _ in range(2):  # the second was made after the answer to the first, and so after the join
        assert table.roster.is_here("worker/1")
        table.take(table.roster.handle_heartbeat("agent/h0", ["worker/0", "server/0"], table.now))
    assert not table.roster.is_here("worker/1")


def test_an_agent_that_reports_its_own_failure_is_the_cause() -> None:
    table = Table(members())
    waiting = [table.join("agent/h0"), table.join("worker/0")][1]
    table.take(table.roster.handle_failed("agent/h0", {"message": "memory is short", "exit_code": 69}, table.now))
    assert isinstance(table.error(waiting), PeerLostError)
    assert table.outcome is not None
    assert table.outcome.cause is not None
    assert (table.outcome.cause.peer, table.outcome.cause.report) == ("agent/h0", {"message": "memory is short", "exit_code": 69})


def test_an_agent_that_gives_up_a_launcher_that_stood_still_is_not_to_blame() -> None:
    table = Table(members())
    table.join_all()
    table.advance(2)
    table.now += 2 * TIMEOUTS.lost_s
    table.take(table.roster.handle_host_ended("h0", "its agent ended with exit code 128", table.now))
    assert table.outcome is not None
    assert table.outcome.cause is not None
    assert f"the launcher itself stood still for {2 * TIMEOUTS.lost_s - TIMEOUTS.heartbeat_s:.0f} s" in table.outcome.cause.reason


def test_each_change_is_a_new_version() -> None:
    table = Table(members(workers=2, servers=0, agents=False))
    versions = [table.roster.view().version]
    for change in (lambda: table.join("worker/0"), lambda: table.join("worker/1"), lambda: table.leave("worker/0")):
        change()
        versions.append(table.roster.view().version)
    assert versions == sorted(set(versions))


def test_joining_again_as_the_same_process_answers_the_newer_request() -> None:
    table = Table(members(workers=2, servers=0, agents=False))
    first, again = table.join("worker/0"), table.join("worker/0")
    assert isinstance(table.error(first), ProtocolError)
    table.join("worker/1")
    assert View.from_value(table.answers[again]).complete
    assert View.from_value(table.answers[table.join("worker/0")]).complete


def test_another_process_takes_the_place_of_one_that_waits() -> None:
    table = Table(members(workers=2, servers=0, agents=False))
    first = table.join("worker/0", 1)
    second = table.join("worker/0", 2)
    assert table.answers[first] == "another process has joined as worker/0"
    table.take(table.roster.handle_lost("worker/0", "killed", table.now))
    assert table.answers[second] == "killed"
    third = table.join("worker/0", 3)
    assert table.roster.state is State.JOINING
    table.join("worker/1")
    assert View.from_value(table.answers[third]).complete


def test_another_process_is_a_loss_once_the_run_goes() -> None:
    table = Table(members(workers=2, servers=0))
    table.join_all()
    assert "came back as another process" in str(table.error(table.join("worker/0", 2)))
    assert table.roster.failures[0].peer == "worker/0"
    assert ("worker/1", "halt") in table.told


def test_observers_come_and_go() -> None:
    table = Table(members(agents=False))
    assert View.from_value(table.answers[table.join("observer/me")]).members["observer/me"].kind == "observer"
    table.join("observer/me", 2)  # restarted: no loss
    table.join_all()
    assert table.roster.state is State.RUNNING
    table.leave("observer/me")
    table.join("observer/me")
    table.take(table.roster.handle_lost("observer/me", "gone", table.now))
    assert table.roster.state is State.RUNNING
    for number in range(MOST_OBSERVERS):
        table.join(f"observer/{number}")
    assert isinstance(table.error(table.join("observer/more")), UsageError)


def test_the_join_deadline_names_who_is_missing() -> None:
    table = Table(members(workers=3))
    table.join("agent/h0")
    waiting = table.join("worker/1")
    table.advance(TIMEOUTS.join_s - 2)
    assert waiting not in table.answers
    table.advance(3)
    error = table.error(waiting)
    assert isinstance(error, PeerTimeoutError)
    assert error.peer == "worker/0, worker/2, server/0"
    assert "3 of 5 are missing" in str(error)
    assert table.roster.state is State.FAILED
    assert isinstance(table.error(table.join("worker/0")), PeerLostError)


def test_names_are_few() -> None:
    assert name_some([f"worker/{n}" for n in range(100)]).endswith("worker/7 and 92 more")


def test_a_role_whose_link_is_up_may_be_silent_for_ever() -> None:
    table = Table(members())
    table.join_all()
    table.advance(600)
    assert (table.roster.state, table.roster.failures) == (State.RUNNING, [])


@pytest.mark.parametrize("peer", ["worker/1", "server/0"])
def test_a_role_that_answers_nothing_stands_still_even_if_its_agent_sees_its_process(peer: str) -> None:
    table = Table(members())
    table.join_all()
    table.take(table.roster.handle_lost(peer, "no connection for 30 s", table.now))
    table.advance(TIMEOUTS.flush_s - 1)
    assert table.roster.state is State.RUNNING
    table.advance(2)
    (failure,) = table.roster.failures
    assert failure.peer == peer
    assert f"{peer} on h0: it stands still" in failure.reason
    assert peer in table.dropped


def test_a_role_whose_link_ends_with_its_process_has_ended() -> None:
    """The link's end comes first, and the report of the exit names the reason."""
    table = Table(members())
    table.join_all()
    table.take(table.roster.handle_lost("worker/1", "it has closed its endpoint", table.now))
    table.advance(1)
    table.exited("worker/1", -9)
    assert table.roster.failures[0].reason == "worker/1 on h0 was killed by SIGKILL"


def test_an_agent_that_is_silent_is_a_lost_host() -> None:
    table = Table(members(workers=4, hosts=2))
    table.join_all()
    table.advance(TIMEOUTS.silent_s - 1, hosts=("h0",))
    assert table.roster.state is State.RUNNING
    table.advance(2, hosts=("h0",))
    failure = table.roster.failures[0]
    assert (failure.peer, failure.consequence) == ("agent/h1", False)
    assert isinstance(failure.error, HostLostError)
    assert "h1: its agent has been silent for 8 s" in str(failure.error)
    assert sorted(table.dropped) == ["agent/h1", "worker/1", "worker/3"]
    assert ("worker/0", "view") in table.told
    assert ("worker/0", "halt") in table.told
    assert not any(peer == "worker/1" for peer, _ in table.told)
    assert "its host h1 is lost" in table.roster.view().lost["worker/3"]


def test_a_process_that_stood_still_itself_judges_nobody() -> None:
    table = Table(members(workers=4, hosts=2))
    table.join_all()
    table.advance(10, hosts=("h0", "h1"))
    table.now += 3600  # a suspended machine
    table.take(table.roster.tick(table.now))
    assert table.roster.state is State.RUNNING
    table.advance(TIMEOUTS.lost_s + 2, hosts=("h0",))
    assert [failure.peer for failure in table.roster.failures] == ["agent/h1"]


def test_a_role_that_its_agent_no_longer_sees_is_lost() -> None:
    table = Table(members())
    table.join_all()
    table.advance(2, alive=["worker/0", "server/0"])
    assert table.roster.failures[0].peer == "worker/1"


@pytest.mark.parametrize(
    ("code", "report", "error", "message"),
    [
        (-9, None, HostLostError, "worker/1 on h0 was killed by SIGKILL"),
        (-99, None, HostLostError, "killed by signal 99"),
        (7, None, TaskError, "exited with code 7 and left no error report"),
        (0, None, TaskError, "ended without leaving the run"),
        (3, {"message": "division by zero"}, TaskError, "worker/1 failed: division by zero"),
    ],
)
def test_an_exit_that_is_a_failure(code: int, report: dict[str, Any] | None, error: type[Exception], message: str) -> None:
    table = Table(members())
    table.join_all()
    table.exited("worker/1", code, report)
    failure = table.roster.failures[0]
    assert isinstance(failure.error, error)
    assert message in failure.reason
    assert (failure.exit_code, failure.report, failure.consequence) == (code, report, False)


def test_the_failure_to_show_is_the_first_that_follows_from_no_other() -> None:
    table = Table(members(workers=3, servers=0))
    table.join_all()
    table.exited("worker/0", 128, {"message": "lost worker/2", "consequence": True})
    assert table.outcome is None
    table.exited("worker/2", 3, {"message": "a bug"})
    table.exited("worker/1", -15, stopped=True)
    assert table.outcome is not None
    assert table.outcome.status == "failed"
    assert table.outcome.cause is not None
    assert table.outcome.cause.peer == "worker/2"
    assert [failure.consequence for failure in table.outcome.failures] == [True, False, True]
    assert ("agent/h0", "finish") in table.told


def test_roles_that_their_agent_ends_do_not_hide_that_somebody_was_missing() -> None:
    """Where the time for joining is over, all processes are ended: also the one whose absence is the reason."""
    table = Table(members(workers=2, servers=0))
    table.join("agent/h0")
    table.advance(TIMEOUTS.join_s + 1)
    table.exited("worker/0", -15, stopped=True)
    table.exited("worker/1", -15, stopped=True)
    assert table.outcome is not None
    assert table.outcome.cause is not None
    assert isinstance(table.outcome.cause.error, PeerTimeoutError)
    assert "2 of 3 are missing" in table.outcome.reason


def test_collecting_failures_ends_after_the_grace_time() -> None:
    table = Table(members())
    table.join_all()
    table.exited("worker/0", 3, {"message": "a bug"})
    table.advance(2 * TIMEOUTS.grace_s + 1)
    assert table.outcome is not None
    assert [failure.peer for failure in table.outcome.failures] == ["worker/0"]
    assert table.roster.next_deadline() is None


def test_only_the_host_s_own_agent_may_report_an_exit() -> None:
    table = Table(members(workers=2, hosts=2))
    table.join_all()
    table.exited("worker/1", 3, agent="agent/h0")
    table.exited("worker/1", 3, agent="worker/0")
    table.exited("nobody", 3)
    assert table.roster.failures == []


def test_an_exit_before_everybody_joined_refuses_those_who_wait() -> None:
    table = Table(members(workers=3, servers=0))
    table.join("agent/h0")
    waiting = table.join("worker/0")
    table.exited("worker/2", 3, {"message": "no module named foo"})
    assert "lost worker/2 while waiting for all members to join: worker/2 failed: no module named foo" in str(table.error(waiting))


def test_scripts_that_never_join_may_end() -> None:
    table = Table(members(workers=2, servers=0))
    table.join("agent/h0")
    table.exited("worker/0", 0)
    table.exited("worker/1", 0)
    assert table.outcome is not None
    assert table.outcome.status == "done"


def test_a_script_that_never_joins_fails_those_who_do() -> None:
    table = Table(members(workers=2, servers=0))
    table.join("agent/h0")
    table.exited("worker/0", 0)
    assert "worker/0 while waiting for all members to join: it ended without joining" in str(table.error(table.join("worker/1")))


def test_the_end_of_a_run_with_agents() -> None:
    table = Table(members(workers=2, servers=1))
    table.join_all()
    table.leave("worker/0")
    table.exited("worker/0", 0)
    table.leave("worker/1")
    assert ("server/0", "finish") in table.told
    table.leave("server/0")
    table.exited("server/0", 0)
    assert table.outcome is None  # worker/1's process is still there
    table.exited("worker/1", 0)
    assert table.outcome is not None
    assert (table.outcome.status, table.outcome.failures) == ("done", ())
    assert table.told.count(("agent/h0", "finish")) == 1


def test_a_server_that_does_not_end_is_a_failure() -> None:
    table = Table(members(workers=1, servers=1, agents=False))
    table.join_all()
    table.leave("worker/0")
    table.advance(TIMEOUTS.request_s + 1)
    assert "server/0 did not answer within 60 s while waiting for the end of the run" in table.roster.failures[0].reason


def test_leaving_and_then_exiting_with_an_error_is_a_failure() -> None:
    table = Table(members(workers=1, servers=0))
    table.join_all()
    table.leave("worker/0")
    table.exited("worker/0", 1)
    assert table.outcome is not None
    assert table.outcome.status == "failed"


def test_an_agent_that_leaves_before_its_roles_is_a_lost_host() -> None:
    table = Table(members())
    table.join_all()
    table.leave("agent/h0")
    assert "left before its roles" in table.roster.failures[0].reason


def test_a_role_without_an_agent_is_judged_by_the_link() -> None:
    table = Table(members(agents=False))
    table.join_all()
    table.take(table.roster.handle_lost("worker/1", "the link is down", table.now))
    assert "lost worker/1 on h0: the link is down" in table.roster.failures[0].reason


def test_halt_is_told_once_and_the_run_ends_halted() -> None:
    table = Table(members(workers=2, servers=0, agents=False))
    table.join_all()
    for peer in ("worker/0", "worker/1"):
        table.take(table.roster.handle_halt(peer, {"message": "the loss is nan"}, table.now))
    assert table.told == [("worker/0", "halt"), ("worker/1", "halt")]
    table.leave("worker/0")
    table.leave("worker/1")
    assert table.outcome is not None
    assert (table.outcome.status, table.outcome.reason) == ("halted", "the loss is nan")


def test_a_run_that_is_stopped_while_it_starts() -> None:
    table = Table(members(workers=2, servers=0))
    table.join("agent/h0")
    waiting = table.join("worker/0")
    table.take(table.roster.handle_halt("coordinator", {"message": "interrupted"}, table.now))
    assert "coordinator stops the run: interrupted" in str(table.error(waiting))
    assert "too late to join: the run was stopped" in str(table.error(table.join("worker/1")))
    assert ("agent/h0", "halt") in table.told


def test_a_host_whose_agent_ended_before_it_joined() -> None:
    table = Table(members(workers=2, servers=0, hosts=2))
    table.join("agent/h0")
    waiting = table.join("worker/0")
    table.take(table.roster.handle_host_ended("h1", "its agent ended with code 1", table.now))
    assert isinstance(table.error(waiting), PeerLostError)
    assert "lost the host h1: its agent ended with code 1" in table.roster.failures[0].reason
    assert table.take(table.roster.handle_host_ended("h1", "again", table.now)) == []
    assert table.take(table.roster.handle_host_ended("h9", "unknown", table.now)) == []


def test_every_state_can_be_left_but_the_last() -> None:
    assert [state for state, following in TRANSITIONS.items() if not following] == [State.ENDED]


calls = st.one_of(
    st.tuples(
        st.just("join"), st.sampled_from(["agent/h0", "agent/h1", "worker/0", "worker/1", "server/0", "x"]), st.integers(1, 2)
    ),
    st.tuples(st.just("barrier"), st.sampled_from(["worker/0", "worker/1", "server/0"]), st.sampled_from(["a", "b"])),
    st.tuples(st.just("heartbeat"), st.sampled_from(["agent/h0", "agent/h1"]), st.lists(st.sampled_from(["worker/0", "worker/1"]))),
    st.tuples(st.just("exited"), st.sampled_from(["worker/0", "worker/1", "server/0"]), st.sampled_from([0, 0, 1, -9])),
    st.tuples(st.sampled_from(["leave", "lost", "halt", "failed"]), st.sampled_from([m.peer for m in members(2, 1, 2)]), st.none()),
    st.tuples(st.just("time"), st.none(), st.sampled_from([0.5, 5.0, 31.0, 200.0])),
)


@given(st.booleans(), st.lists(calls, max_size=40))
def test_whatever_happens_every_request_is_answered_at_most_once_and_the_run_can_end(joined: bool, happened: list[Any]) -> None:
    table = Table(members(2, 1, 2))
    if joined:
        table.join_all()
    tickets = 0
    for what, peer, value in happened:
        roster = table.roster
        if what in ("join", "barrier"):
            tickets = table.join(peer, value) if what == "join" else table.ask("barrier", peer, value, None)
        elif what == "heartbeat":
            table.take(roster.handle_heartbeat(peer, value, table.now))
        elif what == "exited":
            host = "h1" if peer == "worker/1" else "h0"
            table.exited(peer, value, agent=f"agent/{host}")
        elif what == "leave":
            table.leave(peer)
        elif what == "time":
            table.now += value
            table.take(roster.tick(table.now))
        else:
            extra = "it was so" if what == "lost" else {"message": "it was so"}
            table.take(getattr(roster, f"handle_{what}")(peer, extra, table.now))
        deadline = roster.next_deadline()
        assert (deadline is None) == (roster.state is State.ENDED)
    # In silence everything ends, and nobody is left waiting.
    for _ in range(2000):
        deadline = table.roster.next_deadline()
        if deadline is None:
            break
        table.now = max(table.now, deadline)
        table.take(table.roster.tick(table.now))
    if table.roster.state is State.ENDED:
        assert table.outcome is not None
        assert all(ticket in table.answers for ticket in range(1, table._ticket + 1))
    assert isinstance(tickets, int)


def test_events_tell_the_story() -> None:
    table = Table(members(workers=1, servers=0, agents=False))
    notes = [action for action in table.take(table.roster.handle_join("worker/0", 1, "a", 1, 0.0)) if isinstance(action, Note)]
    assert [note.kind for note in notes] == ["join", "running"]
    assert notes[0].reason == "worker/0 joined (1 of 1)"


@pytest.mark.parametrize(("hosts", "pause_s"), [(1, 1.0), (100, 1.0), (150, 1.5), (1000, min(10.0, TIMEOUTS.lost_s / 2))])
def test_many_agents_send_fewer_heartbeats(hosts: int, pause_s: float) -> None:
    table = Table(members(workers=hosts, servers=0, hosts=hosts))
    assert table.roster.heartbeat_s == pytest.approx(pause_s)
