"""Where members wait for each other, without a loop."""

from __future__ import annotations

from tests.membership.table import TIMEOUTS, Table, members
from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.membership.barrier import LONGEST_NAME, MOST_BARRIERS


def test_a_barrier_opens_when_all_are_there() -> None:
    table = Table(members(workers=3))
    table.join_all()
    for _ in range(2):
        tickets = [table.ask("barrier", f"worker/{n}", "epoch", None) for n in range(2)]
        other = table.ask("barrier", "worker/0", "other", ["worker/0", "server/0"])
        assert not set(tickets) & set(table.answers)
        tickets.append(table.ask("barrier", "worker/2", "epoch", None))
        assert all(table.answers[ticket] is None for ticket in tickets)
        assert other not in table.answers
        table.ask("barrier", "server/0", "other", ["server/0", "worker/0"])
        assert table.answers[other] is None


def test_a_barrier_of_all_is_for_those_who_are_left() -> None:
    """Also for those who come after the loss, and with another name for the same."""
    table = Table(members(workers=4, servers=0, hosts=4), elastic=True)
    table.join_all()
    first = [table.ask("barrier", f"worker/{n}", "epoch", None) for n in (0, 1)]
    table.exited("worker/3", -9, agent="agent/h3")
    assert not set(first) & set(table.answers)
    refused = table.ask("barrier", "worker/3", "epoch", None)
    assert isinstance(table.error(refused), PeerLostError)
    last = table.ask("barrier", "worker/2", "epoch", None)
    assert all(table.answers[ticket] is None for ticket in (*first, last))
    rest = [table.ask("barrier", f"worker/{n}", "epoch", None) for n in range(3)]
    assert all(table.answers[ticket] is None for ticket in rest)


def test_a_barrier_that_takes_too_long_names_who_is_missing() -> None:
    table = Table(members(workers=3))
    table.join_all()
    ticket = table.ask("barrier", "worker/1", "epoch", None)
    table.advance(TIMEOUTS.barrier_s - 1)
    assert ticket not in table.answers
    table.advance(1)
    assert "worker/0, worker/2 did not answer within 600 s while waiting for the barrier 'epoch'" in str(table.error(ticket))


def test_a_barrier_with_a_dead_member_fails_naming_it() -> None:
    table = Table(members(workers=3))
    table.join_all()
    before = table.ask("barrier", "worker/0", "epoch", None)
    table.exited("worker/2", -11)
    after = table.ask("barrier", "worker/1", "epoch", None)
    for ticket in (before, after):
        assert "lost worker/2 while waiting for the barrier 'epoch': worker/2 on h0 was killed by SIGSEGV" in str(
            table.error(ticket)
        )


def test_barriers_that_cannot_be() -> None:
    table = Table(members(workers=2))
    early = table.ask("barrier", "worker/0", "epoch", None)
    assert isinstance(table.error(early), ProtocolError)
    table.join("worker/0")
    assert "must wait until all members have joined" in str(table.error(table.ask("barrier", "worker/0", "epoch", None)))
    table.join_all()
    refused = {
        "not part of this run": ("worker/0", "a", ["worker/0", "worker/9"]),
        "without being one of its members": ("worker/0", "a", ["worker/1"]),
        "too long": ("worker/0", "x" * (LONGEST_NAME + 1), None),
        "is not a member": ("worker/9", "a", None),
    }
    for message, args in refused.items():
        assert message in str(table.error(table.ask("barrier", *args)))
    table.ask("barrier", "worker/0", "b", None)
    assert "already waits at the barrier 'b'" in str(table.error(table.ask("barrier", "worker/0", "b", None)))
    assert "with a different set of members" in str(table.error(table.ask("barrier", "server/0", "b", ["server/0", "worker/0"])))
    for number in range(MOST_BARRIERS - 1):
        table.ask("barrier", "worker/0", f"many/{number}", None)
    assert "too many barriers" in str(table.error(table.ask("barrier", "worker/0", "one more", None)))
