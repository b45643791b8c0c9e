"""The coordinator's journal: any prefix of a run's history replays to its state, and only one process holds it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.membership.table import TIMEOUTS, Table, members
from zmqtrain.errors import JournalError
from zmqtrain.membership.actions import Answer
from zmqtrain.membership.journal import NAME, JournalFile, Ledger, change, encode, replay
from zmqtrain.membership.roster import Roster
from zmqtrain.membership.state import State
from zmqtrain.wire.payload import Value

PEERS = ["worker/0", "worker/1", "worker/2"]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["leave", "exited", "failed", "halt", "lost", "barrier", "agree", "again", "join", "tick"]),
        st.sampled_from([*PEERS, "server/0", "agent/h0", "agent/h1"]),
        st.integers(0, 2),
    ),
    max_size=14,
)


def happen(table: Table, what: str, peer: str, number: int) -> None:
    roster, now = table.roster, table.now
    match what:
        case "exited":
            host = f"h{int(peer[-1]) % 2}" if peer.startswith(("worker", "server")) else "h0"
            report = {"message": "no luck", "exit_code": 3} if number == 2 else None
            table.take(roster.handle_exited(f"agent/{host}", peer, -9 * number, report, stopped=False, now=now, pid=7))
        case "failed":
            table.take(roster.handle_failed(peer, {"message": "memory is short", "exit_code": 69}, now))
        case "halt":
            table.take(roster.handle_halt(peer, {"kind": "nan", "message": "the loss is nan", "step": number}, now))
        case "lost":
            table.take(roster.handle_lost(peer, "no connection", now))
        case "leave":
            table.leave(peer)
        case "barrier":
            table.ask("barrier", peer, "end", None)
        case "agree":
            table.ask("agree", peer, "step", number, PEERS, None)
        case "again":
            table.ask("again", peer, 1)
        case "join":
            table.join(peer, number)
        case "tick":
            table.now += number * TIMEOUTS.lost_s / 3
            table.take(roster.tick(table.now))


@given(events=EVENTS, elastic=st.booleans(), cut=st.integers(0, 10_000))
def test_any_prefix_of_a_history_replays_to_the_state(events: list[tuple[str, str, int]], elastic: bool, cut: int) -> None:
    expected = members(3, hosts=2)
    table = Table(expected, elastic=elastic)
    table.join_all()
    kept: dict[str, Value] = {}
    data, whole = b"", [(0, {})]
    for what, peer, number in [("tick", "", 0), *events]:
        if table.roster.state is not State.ENDED:
            happen(table, what, peer, number)
        ledger = table.roster.ledger()
        data += encode(change(kept, ledger))
        kept = ledger
        whole.append((len(data), ledger))
    for end, ledger in whole:
        assert replay(data[:end]) == (ledger, end)
        if ledger:
            assert Roster(expected, TIMEOUTS, now=5.0, elastic=elastic, ledger=replay(data[:end])[0]).ledger() == ledger
    torn = data[: cut % (len(data) + 1)]
    assert replay(torn) == next((ledger, end) for end, ledger in reversed(whole) if end <= len(torn))
    assert replay(torn + bytes(100)) == replay(torn)  # as a machine that lost power may leave it


def another(table: Table) -> Table:
    """The table of a coordinator that takes over."""
    successor = Table(table.expected)
    successor.roster = Roster(table.expected, TIMEOUTS, now=table.now, patient=True, ledger=table.roster.ledger())
    successor.now = table.now
    return successor


def test_a_barrier_that_has_opened_is_open_for_those_that_ask_the_successor() -> None:
    table = Table(members())
    table.join_all()
    who = ["worker/0", "worker/1"]
    for peer, value in (("worker/0", 4), ("worker/1", 7)):
        table._ticket += 1
        table.take(table.roster.handle_agree(peer, "members", value, who, None, table._ticket, table.now, call=value))
    successor = another(table)
    again = successor.roster.handle_agree("worker/0", "members", 4, who, None, 1, successor.now, call=4)
    assert [action.value for action in again if isinstance(action, Answer)] == [7]
    # The same name with another call is another agreement, which waits for all.
    assert successor.roster.handle_agree("worker/0", "members", 5, who, None, 2, successor.now, call=5) == []
    assert successor.roster.handle_agree("worker/0", "members", 5, who, None, 3, successor.now, call=5)[0].reason.endswith(
        "asked again"
    )


def test_the_successor_gives_the_agents_time_and_then_loses_the_silent_ones() -> None:
    table = Table(members(hosts=2, servers=0))
    table.join_all()
    successor = another(table)
    successor.advance(TIMEOUTS.lost_s, hosts=("h0",))
    assert successor.roster.state is State.RUNNING
    successor.advance(TIMEOUTS.lost_s, hosts=("h0",))
    assert successor.roster.failures[0].peer == "agent/h1"


def test_who_was_given_up_is_told_so() -> None:
    table = Table(members())
    table.join_all()
    table.exited("worker/1", -9)
    successor = another(table)
    assert "has given up worker/1" in str(successor.error(successor.ask("again", "worker/1", 1)))
    assert "has given up worker/0" in str(successor.error(successor.ask("again", "worker/0", 2)))  # another process
    missed: Any = successor.answers[successor.ask("again", "worker/0", 1)]
    assert (missed["halt"]["kind"], missed["finish"]) == ("failure", False)


def test_the_file_is_replaced_by_its_ledger_before_it_grows(tmp_path: Path) -> None:
    path = tmp_path / NAME
    journal = JournalFile.create(path, {"launch": {"epoch": 1}})
    assert path.stat().st_mode & 0o777 == 0o600
    for number in range(40):
        journal.stage({"file/events.jsonl": number})
        journal.write({"note": "x" * 100_000, "number": number}, durable=number % 7 == 0)
    assert path.stat().st_size < 3 << 20
    expected: Ledger = {"launch": {"epoch": 1}, "file/events.jsonl": 39, "note": "x" * 100_000, "number": 39}
    assert JournalFile.read(path) == journal.ledger == expected


def test_only_one_process_leads_and_the_one_before_notices(tmp_path: Path) -> None:
    path = tmp_path / NAME
    first = JournalFile.create(path, {"a": 1})
    with pytest.raises(JournalError, match="another launcher leads"):
        JournalFile.take_over(path)
    with pytest.raises(JournalError, match="another launcher leads"):
        JournalFile.create(path, {})
    stale = os.open(path, os.O_RDWR)  # a launcher on a machine that does not see the lock
    first.close()
    second = JournalFile.take_over(path)
    assert second.ledger == {"a": 1}
    old = JournalFile(path, stale, {"a": 1})
    assert not old.superseded
    second.begin_epoch({"a": 2})
    assert old.superseded
    assert not second.superseded
    old.write({"a": 3}, durable=True)
    assert JournalFile.read(path) == {"a": 2}
    old.remove()
    old.close()
    assert path.exists()
    second.remove()
    assert not path.exists()
    second.close()


def test_a_torn_end_is_cut_off_and_a_damaged_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / NAME
    journal = JournalFile.create(path, {"a": 1})
    journal.write({"b": 2}, durable=True)
    journal.close()
    good = path.read_bytes()
    path.write_bytes(good + encode({"c": 3})[:-1])
    journal = JournalFile.take_over(path)
    assert journal.ledger == {"a": 1, "b": 2}
    assert path.read_bytes() == good
    journal.write({"d": 4}, durable=False)
    journal.close()
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match="damaged"):
        JournalFile.take_over(path)
    with pytest.raises(JournalError, match="cannot be read"):
        JournalFile.take_over(tmp_path / "none")
