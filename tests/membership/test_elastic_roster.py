"""Elastic runs: the coordinator's decisions when workers are lost and come back, without a loop."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.membership.table import TIMEOUTS, Table, members
from zmqtrain.errors import PeerLostError, PeerTimeoutError, TooLateError, UsageError, ViewChangedError
from zmqtrain.membership.roster import Roster
from zmqtrain.membership.state import State
from zmqtrain.membership.view import Member, View


def running(workers: int = 3, hosts: int = 1, *, agents: bool = True) -> Table:
    table = Table(members(workers, 0, hosts, agents=agents), elastic=True)
    table.join_all()
    assert table.roster.state is State.RUNNING
    table.told.clear()
    return table


def agree(table: Table, peer: str, value: int, who: list[str], *, name: str = "members", version: int | None = None) -> int:
    return table.ask("agree", peer, name, value, who, version)


def everybody(table: Table) -> list[str]:
    return [member.peer for member in table.roster.view().workers()]


def test_a_killed_worker_is_no_failure_and_all_are_told() -> None:
    table = running()
    table.exited("worker/1", -9)
    assert table.roster.state is State.RUNNING
    assert everybody(table) == ["worker/0", "worker/2"]
    assert "worker/1" in table.roster.view().lost
    assert {peer for peer, what in table.told if what == "view"} == {"agent/h0", "worker/0", "worker/2"}
    assert not [what for _, what in table.told if what == "halt"]
    for worker in ("worker/0", "worker/2"):
        table.leave(worker)
        table.exited(worker, 0)
    assert table.outcome is not None
    assert table.outcome.status == "done"
    assert not table.roster.agents_here(late=True)
    assert table.outcome.losses == ("worker/1 on h0 was killed by SIGKILL",)


@pytest.mark.parametrize(
    ("code", "report"),
    [(3, {"message": "a bug", "exit_code": 3}), (1, None), (0, None), (64, {"message": "its loss is NaN", "exit_code": 64})],
)
def test_a_worker_that_fails_by_itself_fails_the_run(code: int, report: dict[str, Any] | None) -> None:
    table = running()
    table.exited("worker/1", code, report)
    assert table.roster.state is State.FAILED


def test_a_worker_that_lost_its_network_is_lost() -> None:
    table = running()
    table.exited("worker/1", 128, {"message": "lost worker/2", "exit_code": 128})
    assert table.roster.state is State.RUNNING
    assert everybody(table) == ["worker/0", "worker/2"]


def test_the_last_worker_s_loss_fails_the_run() -> None:
    table = running(2)
    table.exited("worker/1", -9)
    table.exited("worker/0", -9)
    assert table.roster.state in (State.FAILED, State.ENDED)


@pytest.mark.parametrize("first", ["worker/0", "worker/1"])
def test_when_all_fail_by_themselves_their_links_end_first_and_their_errors_count(first: str) -> None:
    table = running(2)
    for peer in ("worker/0", "worker/1"):
        table.take(table.roster.handle_lost(peer, "it has closed its endpoint", table.now))
    assert table.roster.state is State.FAILED
    for peer in sorted(("worker/0", "worker/1"), key=lambda peer: peer != first):
        table.exited(peer, 3, {"message": "a bug", "exit_code": 3})
    assert table.outcome is not None
    assert [failure.exit_code for failure in table.outcome.failures] == [3, 3]
    assert table.outcome.cause is not None
    assert table.outcome.cause.report is not None
    assert "a bug" in table.outcome.reason


def test_the_last_worker_s_kill_says_more_than_its_closed_link() -> None:
    table = running(1)
    table.take(table.roster.handle_lost("worker/0", "it has closed its endpoint", table.now))
    table.exited("worker/0", -9)
    assert table.outcome is not None
    assert table.outcome.reason == "worker/0 on h0 was killed by SIGKILL"


def of_servers(workers: int = 2) -> Table:
    """A running run whose model servers keep what workers have trained."""
    table = Table(members(workers, 1, 1), elastic=True, lasting=True)
    table.join_all()
    table.told.clear()
    return table


def test_what_servers_have_outlives_all_workers_if_one_is_started_again() -> None:
    table = of_servers()
    table.take(table.roster.handle_lost("worker/0", "its link ended", table.now))
    table.exited("worker/1", -9)
    assert table.roster.state is State.RUNNING  # nobody has said yet whether worker/0 comes back
    table.exited("worker/0", -9, again=True)
    assert table.roster.state is State.RUNNING
    assert "finish" not in [what for _, what in table.told]
    table.advance(TIMEOUTS.join_s / 2, ["server/0"])
    table.join("worker/0", 2)
    table.advance(TIMEOUTS.join_s, ["server/0", "worker/0"])
    table.ask("ready", "worker/0")
    assert everybody(table) == ["worker/0"]
    table.leave("worker/0")
    assert table.roster.state is State.FINISHING


@pytest.mark.parametrize("lasting", [False, True])
def test_a_run_without_workers_that_nobody_starts_again_has_failed_of_the_last_kill(lasting: bool) -> None:
    table = Table(members(2, 1, 1), elastic=True, lasting=lasting)
    table.join_all()
    table.exited("worker/1", -9, again=not lasting)  # it makes no difference where nobody keeps what was trained
    table.take(table.roster.handle_lost("worker/0", "its link ended", table.now))
    table.exited("worker/0", -9, again=not lasting)
    assert table.roster.state is State.FAILED
    assert [failure.reason for failure in table.roster.failures] == ["worker/0 on h0 was killed by SIGKILL"]


@pytest.mark.parametrize("how", ["it never joins", "it ends before it joins", "its host is lost", "its own code fails"])
def test_a_worker_that_was_to_come_back_and_does_not_ends_the_run(how: str) -> None:
    table = of_servers(1)
    table.exited("worker/0", -9, again=True)
    if how == "it never joins":
        table.advance(TIMEOUTS.join_s - 1, ["server/0"])
        assert table.roster.state is State.RUNNING
        table.advance(2, ["server/0"])
    elif how == "it ends before it joins":
        table.exited("worker/0", -9, again=True)
        assert table.roster.state is State.RUNNING
        table.exited("worker/0", -9)
    elif how == "its host is lost":
        table.take(table.roster.handle_host_ended("h0", "it is gone", table.now))
    else:
        table.join("worker/0", 2)
        table.exited("worker/0", 3, {"message": "a bug", "exit_code": 3})
    assert table.roster.failures
    assert table.roster.state in (State.FAILED, State.ENDED)


def test_another_coordinator_waits_for_workers_as_the_one_before_it() -> None:
    table = of_servers(1)
    table.exited("worker/0", -9, again=True)
    other = Table(members(1, 1, 1), elastic=True, lasting=True)
    other.roster = Roster(other.expected, TIMEOUTS, now=0.0, elastic=True, lasting=True, ledger=table.roster.ledger())
    other.ask("again", "server/0", 1)
    other.advance(TIMEOUTS.join_s / 2, ["server/0"])
    assert other.roster.state is State.RUNNING
    other.advance(TIMEOUTS.join_s, ["server/0"])
    assert [failure.reason for failure in other.roster.failures] == ["all workers were lost before another launcher took over"]


def test_one_that_does_not_come_back_to_another_coordinator_stands_still() -> None:
    table = Table(members(2, 0, 1), elastic=True, patient=True)
    table.join_all()
    other = Table(members(2, 0, 1), elastic=True)
    other.roster = Roster(other.expected, TIMEOUTS, now=0.0, elastic=True, patient=True, ledger=table.roster.ledger())
    other.ask("again", "worker/0", 1)
    other.advance(TIMEOUTS.request_s)
    assert set(other.roster.view().lost) == set()
    other.advance(2 * TIMEOUTS.flush_s)
    assert set(other.roster.view().lost) == {"worker/1"}
    assert "it stands still" in other.roster.view().lost["worker/1"]


@pytest.mark.parametrize("trained", [True, False])
def test_one_that_came_too_late_leaves_without_having_done_the_work(trained: bool) -> None:
    """If the other one is lost after that, before it has left, nobody has the model."""
    table = running(2)
    table.exited("worker/1", -9)
    table.ask("join", "worker/1", 2, "tcp://again")
    table.take(table.roster.handle_leave("worker/1", table.now, late=True))
    table.exited("worker/1", 0)
    assert table.roster.state is State.RUNNING
    table.take(table.roster.handle_join("worker/1", 3, "tcp://again", 99, table.now))
    assert isinstance(table.answers[99], TooLateError)
    if trained:
        table.leave("worker/0")
    table.exited("worker/0", 0 if trained else -9)
    assert table.outcome is not None
    assert table.outcome.status == ("done" if trained else "failed")


def test_when_the_first_has_left_late_ones_are_told_that_the_run_ends_and_others_are_refused() -> None:
    table = running(4)
    for worker in ("worker/2", "worker/3"):
        table.exited(worker, -9)
    table.join("worker/2", 2)  # and is not ready yet
    assert not [peer for peer, what in table.told if what == "finish"]
    table.leave("worker/0")
    assert sorted(peer for peer, what in table.told if what == "finish") == ["worker/2"]
    assert isinstance(table.answers[table.join("worker/3", 3)], TooLateError)
    table.leave("worker/1")
    assert len([peer for peer, what in table.told if what == "finish"]) == 1, "once is enough"
    again = table.answers[table.ask("again", "worker/2", 2)]  # it has lost touch meanwhile
    assert again["finish"] is True
    other = Roster(table.expected, TIMEOUTS, now=0.0, elastic=True, ledger=table.roster.ledger())
    later = Table(table.expected, elastic=True)
    later.roster = other
    assert later.answers[later.ask("again", "worker/2", 2)]["finish"] is True
    table.take(table.roster.handle_leave("worker/2", table.now, late=True))
    for peer in ("worker/0", "worker/1", "worker/2"):
        table.exited(peer, 0)
    assert table.outcome is not None
    assert table.outcome.status == "done"
    assert isinstance(table.answers[table.join("worker/3", 4)], TooLateError), "also when the run has ended"


def test_one_that_comes_when_a_run_has_failed_is_not_told_that_it_had_ended() -> None:
    table = running(2)
    table.leave("worker/0")
    table.exited("worker/1", 3, {"message": "a bug", "exit_code": 3})
    error = table.error(table.join("worker/1", 2))
    assert isinstance(error, PeerLostError)
    assert not isinstance(error, TooLateError)


def test_a_server_s_loss_fails_the_run() -> None:
    table = Table(members(2, 1), elastic=True)
    table.join_all()
    table.exited("server/0", -9)
    assert table.roster.state is State.FAILED


def test_a_silent_host_takes_its_workers_and_no_more() -> None:
    table = running(4, hosts=2)
    table.advance(2 * TIMEOUTS.lost_s, ["worker/0", "worker/2"], hosts=("h0",))
    assert table.roster.state is State.RUNNING
    assert everybody(table) == ["worker/0", "worker/2"]


@pytest.mark.parametrize("agents", [True, False])
def test_a_worker_whose_link_is_lost_is_not_waited_for(agents: bool) -> None:
    table = running(agents=agents)
    table.take(table.roster.handle_lost("worker/1", "no connection for 30 s", table.now))
    assert everybody(table) == ["worker/0", "worker/2"]
    assert "worker/1" in table.dropped
    if agents:  # its agent ends it, and says so
        table.exited("worker/1", -9)
        assert table.roster.state is State.RUNNING


def test_a_worker_whose_agent_has_left_is_judged_by_its_link() -> None:
    """Something else than its agent has started it again. Nobody would ever say that its process has ended."""
    table = Table(members(2, 0, 2), elastic=True, patient=True)
    table.join_all()
    table.exited("worker/1", -9)
    table.leave("agent/h1")
    table.join("worker/1", incarnation=2)
    assert everybody(table) == ["worker/0", "worker/1"]
    table.take(table.roster.handle_lost("worker/1", "it has closed its endpoint", table.now))
    assert everybody(table) == ["worker/0"]
    table.leave("worker/0")
    table.exited("worker/0", 0)
    assert table.outcome is not None


def test_a_worker_comes_back_and_is_counted_once_it_is_ready() -> None:
    table = running()
    table.exited("worker/1", -9)
    table.told.clear()
    again = table.join("worker/1", incarnation=2)
    answer = table.answers[again]
    assert answer["late"] is True
    member = View.from_value(answer).members["worker/1"]
    assert (member.incarnation, member.ready) == (2, False)
    assert ("worker/0", "view") in table.told
    assert ("worker/1", "view") not in table.told
    ready = table.ask("ready", "worker/1")
    assert View.from_value(table.answers[ready]).members["worker/1"].ready
    assert "worker/1" not in table.roster.view().lost


def test_one_that_is_lost_while_it_joins_hears_that_it_was_and_not_that_it_never_came() -> None:
    """That would be an error of its own, which fails the run."""
    table = running()
    table.exited("worker/1", -9)
    table.join("worker/1", 2)
    table.exited("worker/1", -9)
    error = table.error(table.ask("ready", "worker/1"))
    assert isinstance(error, PeerLostError)
    assert "has given up worker/1" in str(error)


def test_a_worker_that_is_replaced_before_anybody_noticed_is_lost_by_that() -> None:
    table = running()
    before = table.roster.view().version
    table.join("worker/1", incarnation=2)
    assert table.roster.view().members["worker/1"].incarnation == 2
    assert "worker/1" in table.dropped
    assert table.roster.view().version == before + 2
    assert table.roster.state is State.RUNNING


def test_all_get_the_largest_value() -> None:
    table = running()
    who = everybody(table)
    tickets = [agree(table, peer, value, who) for peer, value in zip(who, (4, 9, 2), strict=True)]
    assert [table.answers[ticket] for ticket in tickets] == [9, 9, 9]


def test_a_loss_or_another_view_ends_an_agreement_for_all() -> None:
    table = running()
    version = table.roster.view().version
    first = agree(table, "worker/0", 1, everybody(table), version=version)
    unversioned = agree(table, "worker/0", 1, ["worker/0", "worker/2"], name="evaluated")
    table.exited("worker/1", -9)
    assert isinstance(table.answers[first], PeerLostError)
    assert unversioned not in table.answers
    assert isinstance(table.answers[agree(table, "worker/2", 1, ["worker/0", "worker/2"], version=version)], ViewChangedError)
    assert isinstance(table.answers[agree(table, "worker/2", 1, ["worker/0", "worker/1", "worker/2"])], PeerLostError)
    waiting = agree(table, "worker/0", 1, ["worker/0", "worker/2"], version=table.roster.view().version)
    table.join("worker/1", incarnation=2)
    assert isinstance(table.answers[waiting], ViewChangedError)
    agree(table, "worker/2", 5, ["worker/0", "worker/2"], name="evaluated")
    assert table.answers[unversioned] == 5


def test_an_agent_that_comes_back_as_another_process_has_lost_its_roles() -> None:
    """Its host was started again, sooner than it could be missed. The others have left meanwhile, since all was trained."""
    table = running(hosts=2)
    for worker in ("worker/0", "worker/2"):
        table.leave(worker)
        table.exited(worker, 0)
    table.leave("agent/h0")
    late = table.join("agent/h1", incarnation=2)
    assert "worker/1" in table.roster.view().lost
    assert isinstance(table.answers[late], PeerLostError)
    assert table.outcome is not None
    assert table.outcome.status == "done"


def test_an_agent_that_comes_back_in_the_middle_of_a_run_starts_its_workers_again() -> None:
    table = running(hosts=2)
    late = table.join("agent/h1", incarnation=2)
    assert table.answers[late]["late"] is True
    assert everybody(table) == ["worker/0", "worker/2"]
    late = table.join("worker/1", incarnation=2)
    assert table.answers[late]["late"] is True
    assert everybody(table) == ["worker/0", "worker/1", "worker/2"]
    assert table.roster.state is State.RUNNING


def test_an_agreement_is_about_one_view_although_one_of_those_who_agree_was_given_a_newer_one() -> None:
    """An agent has left, which the others were not told, and a worker that was out of touch gets the view of now."""
    table = running(hosts=2)
    table.exited("worker/1", -9, agent="agent/h1")
    who = everybody(table)
    version = table.roster.view().version
    table.told.clear()
    table.leave("agent/h1")
    known = table.roster.view().version
    assert known > version
    assert not table.told
    before = agree(table, "worker/0", 1, who, version=version)
    ahead = agree(table, "worker/2", 5, who, version=known)
    assert isinstance(table.answers[before], ViewChangedError)
    assert ("worker/0", "view") in table.told
    again = agree(table, "worker/0", 1, who, version=known)
    assert (table.answers[ahead], table.answers[again]) == (5, 5)


def test_nobody_waits_for_a_process_in_whose_place_there_is_another_one() -> None:
    table = running()
    who = everybody(table)
    lives = {peer: member.incarnation for peer, member in table.roster.view().members.items() if peer in who}
    table.join("worker/1", incarnation=2)
    late = table.ask("agree", "worker/0", "begun", 0, who, None, processes=lives)
    assert "another process has taken its place" in str(table.answers[late])
    assert table.ask("agree", "worker/0", "begun", 0, who, None, processes=lives | {"worker/1": 2}) not in table.answers


def test_agreements_are_among_members_and_time_out() -> None:
    table = running()
    assert isinstance(table.answers[agree(table, "worker/0", 1, ["worker/1"])], UsageError)
    assert isinstance(table.answers[agree(table, "worker/0", 1, ["worker/0", "worker/9"])], UsageError)
    waiting = agree(table, "worker/0", 1, everybody(table))
    table.advance(TIMEOUTS.barrier_s + 1)
    assert isinstance(table.answers[waiting], PeerTimeoutError)
    assert "worker/1, worker/2" in str(table.answers[waiting])


def test_a_barrier_of_all_goes_on_without_the_lost() -> None:
    table = running()
    waiting = [table.ask("barrier", peer, "trained", None) for peer in ("worker/0", "worker/2")]
    assert not any(ticket in table.answers for ticket in waiting)
    table.exited("worker/1", -9)
    assert [table.answers[ticket] for ticket in waiting] == [None, None]


def test_in_a_fixed_run_nobody_comes_back() -> None:
    table = Table(members(2, 0))
    table.join_all()
    again = table.join("worker/1", incarnation=2)
    assert isinstance(table.answers[again], PeerLostError)
    assert table.roster.state is State.FAILED


@settings(max_examples=200)
@given(st.data())
def test_whatever_happens_agreements_end_alike_for_all_and_versions_grow(data: st.DataObject) -> None:
    """Workers die, come back and agree on the members, as `zmqtrain.exchange.elastic` does: no two of them ever learn different
    steps for one view, and nobody waits for ever."""
    table = running(4)
    incarnation, version = 1, table.roster.view().version
    waiting: dict[str, tuple[int, int]] = {}  # worker -> its ticket, and the version that it is about
    learned: dict[int, set[int]] = {}
    knows: set[tuple[str, int]] = set()  # worker and version: it has no reason to ask again
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["agree", "agree", "agree", "kill", "back"]))
        here = [member.peer for member in table.roster.view().workers()]
        peer = f"worker/{data.draw(st.integers(0, 3))}"
        if action == "kill" and peer in here and len(here) > 1:
            table.exited(peer, -9)
            waiting.pop(peer, None)
        elif action == "back" and peer not in here:
            incarnation += 1
            table.join(peer, incarnation)
            table.ask("ready", peer)
        elif action == "agree" and peer in here and peer not in waiting and (peer, version) not in knows:
            about = table.roster.view().version
            waiting[peer] = (agree(table, peer, data.draw(st.integers(0, 50)), here, version=about), about)
        for worker, (ticket, about) in list(waiting.items()):
            if ticket in table.answers:
                answer = table.answers[ticket]
                if isinstance(answer, int):
                    learned.setdefault(about, set()).add(answer)
                    knows.add((worker, about))
                else:
                    assert isinstance(answer, PeerLostError | ViewChangedError)
                del waiting[worker]
        assert table.roster.view().version >= version
        version = table.roster.view().version
        assert all(about == version for _, about in waiting.values()), "somebody waits for a view that is past"
    assert all(len(steps) == 1 for steps in learned.values())
    assert table.roster.state is State.RUNNING


def test_one_that_may_come_later_is_not_waited_for_and_comes_with_its_agent() -> None:
    spare = [Member("agent/joined-1", "", "joined-1", "agent", -1), Member("worker/3", "", "joined-1", "worker", 3, 3, 0)]
    table = Table(members(3, 0), elastic=True, spare=spare)
    early = table.join("agent/joined-1", 5)
    assert isinstance(table.answers[early], UsageError)
    table.join_all()
    assert table.roster.state is State.RUNNING
    assert "worker/3" not in table.roster.view().lost
    alone = table.join("worker/3", 6)
    assert isinstance(table.answers[alone], PeerLostError)
    table.join("agent/joined-1", 7)
    late = table.join("worker/3", 8)
    assert table.answers[late]["late"]
    for worker in everybody(table):
        table.leave(worker)
    assert table.roster.state is State.FINISHING
    assert table.roster.agents_here(late=True), "the coordinator must not end before its last call is answered"
    table.leave("agent/joined-1")
    assert not table.roster.agents_here(late=True)


def test_one_that_never_comes_is_not_missed_at_the_end() -> None:
    spare = [Member("agent/joined-1", "", "joined-1", "agent", -1), Member("worker/3", "", "joined-1", "worker", 3, 3, 0)]
    table = Table(members(3, 0), elastic=True, spare=spare)
    table.join_all()
    for worker in everybody(table):
        table.leave(worker)
        table.exited(worker, 0)
    assert table.outcome is not None
    assert table.outcome.status == "done"


# Groups that are lost and come back as a whole.


def whole_groups(groups: int = 2, size: int = 2, hosts: int = 1, *, lasting: bool = False) -> Table:
    expected = [Member(f"agent/h{number}", "", f"h{number}", "agent", -1) for number in range(hosts)]
    expected += [
        Member(f"worker/{rank}", "", f"h{rank % hosts}", "worker", rank, rank // size, rank % size) for rank in range(groups * size)
    ]
    table = Table(expected, elastic=True, whole_groups=True, lasting=lasting)
    table.join_all()
    table.told.clear()
    return table


def test_a_group_is_lost_as_a_whole_in_one_view() -> None:
    table = whole_groups()
    before = table.roster.version
    table.exited("worker/3", -9, again=True)
    assert everybody(table) == ["worker/0", "worker/1"]
    lost = table.roster.view().lost
    assert "killed" in lost["worker/3"]
    assert lost["worker/2"] == "its group cannot go on without worker/3"
    assert "worker/2" in table.dropped, "it may still be alive"
    assert [peer for peer, what in table.told if what == "view"] == ["agent/h0", "worker/0", "worker/1"], "one view says both"
    assert table.roster.version > before
    table.exited("worker/2", 128, {"message": "lost worker/3", "exit_code": 128}, again=True)
    assert table.roster.state is State.RUNNING
    assert everybody(table) == ["worker/0", "worker/1"]
    for worker in ("worker/0", "worker/1"):
        table.leave(worker)
        table.exited(worker, 0)
    assert table.outcome is not None
    assert table.outcome.losses == (
        "worker/3 on h0 was killed by SIGKILL",
        "lost worker/2 on h0: its group cannot go on without worker/3",
    )


def test_another_process_in_place_of_one_takes_the_others_of_its_group_with_it() -> None:
    table = whole_groups()
    table.join("worker/3", 2)
    assert everybody(table) == ["worker/0", "worker/1", "worker/3"]
    assert table.roster.view().lost["worker/2"] == "its group cannot go on without worker/3"


def test_a_host_takes_the_groups_of_its_workers_with_it() -> None:
    table = whole_groups(groups=3, size=2, hosts=3)  # worker/2 is on h2, its mate worker/3 on h0
    table.take(table.roster.handle_host_ended("h2", "it is gone", table.now))
    assert everybody(table) == ["worker/0", "worker/1"]
    assert {"worker/2", "worker/3", "worker/4", "worker/5"} <= table.roster.view().lost.keys()


def test_a_group_is_ready_as_a_whole_in_one_view() -> None:
    table = whole_groups()
    table.exited("worker/3", -9, again=True)
    table.exited("worker/2", 128, {"message": "lost worker/3", "exit_code": 128}, again=True)
    for peer in ("worker/3", "worker/2"):
        table.join(peer, 2)
    table.told.clear()
    changes = table.roster.view().changes
    first = table.ask("ready", "worker/3")
    assert first not in table.answers
    again = table.ask("ready", "worker/3")  # it has lost touch, and asks once more
    assert "asked again" in table.answers[first]
    assert not table.told
    last = table.ask("ready", "worker/2")
    for ticket in (again, last):
        there = View.from_value(table.answers[ticket]).members
        assert there["worker/2"].ready
        assert there["worker/3"].ready
    assert table.roster.view().changes == changes + 2
    assert [peer for peer, what in table.told if what == "view"] == ["agent/h0", "worker/0", "worker/1"]


def test_one_that_is_ready_is_lost_with_one_that_is_not() -> None:
    table = whole_groups()
    table.exited("worker/3", -9, again=True)
    table.exited("worker/2", 128, {"message": "lost worker/3", "exit_code": 128}, again=True)
    table.join("worker/3", 2)
    table.join("worker/2", 2)
    waits = table.ask("ready", "worker/3")
    table.exited("worker/2", -9, again=True)
    assert isinstance(table.error(waits), PeerLostError)
    assert everybody(table) == ["worker/0", "worker/1"]


def test_those_that_wait_for_others_of_their_group_do_not_keep_a_run_going() -> None:
    table = whole_groups()
    table.exited("worker/3", -9, again=True)
    table.exited("worker/2", 128, {"message": "lost worker/3", "exit_code": 128}, again=True)
    table.join("worker/2", 2)
    assert table.roster.state is State.RUNNING
    table.exited("worker/0", -9)
    assert table.roster.state is State.FAILED


@pytest.mark.parametrize("returns", [True, False])
def test_without_workers_a_run_waits_for_a_whole_group_if_servers_have_what_was_trained(returns: bool) -> None:
    table = whole_groups(lasting=True)
    for group in (0, 2):
        first, second = f"worker/{group}", f"worker/{group + 1}"
        table.exited(second, -9, again=returns and group == 2)
        table.exited(first, 128, {"message": f"lost {second}", "exit_code": 128}, again=True)
    if not returns:  # at once: of each group one is gone for good
        assert table.outcome is not None
        assert table.outcome.status == "failed"
        return
    table.join("worker/0", 2)
    table.join("worker/2", 2)
    assert table.roster.state is State.RUNNING
    table.advance(TIMEOUTS.join_s / 2)
    table.join("worker/3", 2)
    table.ask("ready", "worker/3")
    table.ask("ready", "worker/2")
    table.advance(TIMEOUTS.join_s)
    assert table.roster.state is State.RUNNING, "it trains again"


def test_those_that_wait_for_others_are_not_waited_for_longer_than_joining_may_take() -> None:
    table = whole_groups(groups=1, lasting=True)
    table.exited("worker/1", -9, again=True)
    table.exited("worker/0", 128, {"message": "lost worker/1", "exit_code": 128}, again=True)
    table.join("worker/0", 2)
    table.advance(TIMEOUTS.join_s + 1)
    assert table.roster.state is State.FAILED


def test_those_that_wait_are_told_that_training_has_ended_also_by_another_coordinator() -> None:
    table = whole_groups()
    table.exited("worker/3", -9, again=True)
    table.exited("worker/2", 128, {"message": "lost worker/3", "exit_code": 128}, again=True)
    table.join("worker/2", 2)
    later = Table(table.expected, elastic=True, whole_groups=True)
    later.roster = Roster(table.expected, TIMEOUTS, now=0.0, elastic=True, whole_groups=True, ledger=table.roster.ledger())
    later.leave("worker/0")
    assert ("worker/2", "finish") in later.told
