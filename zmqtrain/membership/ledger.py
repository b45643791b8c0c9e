"""What the coordinator must not forget, as plain values for its journal, and back. Pure."""

from __future__ import annotations

from typing import Any

from zmqtrain.membership.actions import Failure
from zmqtrain.membership.state import Entry, Presence
from zmqtrain.net.requests import describe_error, rebuild_error
from zmqtrain.wire.message import pack_value, unpack_value
from zmqtrain.wire.payload import Value

#: Names in the ledger: of the run's state, and what the names of members and of barriers that have opened begin with.
RUN, MEMBER, OPENED = "run", "member/", "opened/"
#: The name of which servers have each shard.
CHAINS = "chains"
#: The name of which shards are to move, and which servers are to leave.
MOVES = "moves"


def value_of_entry(entry: Entry) -> Value:
    """A member, without what follows from the placement."""
    member = entry.member
    return [entry.presence.value, entry.incarnation, entry.exited, entry.returns, entry.reason, member.address, member.ready]


def restore_entry(entry: Entry, value: Any) -> None:
    """Set the entry to what `value_of_entry` has returned."""
    presence, incarnation, exited, returns, reason, address, ready = value
    entry.welcome(incarnation, address, ready=ready)
    entry.presence, entry.exited, entry.returns, entry.reason = Presence(presence), exited, returns, reason


def value_of_failure(failure: Failure) -> Value:
    """A failure, with its error."""
    report = None if failure.report is None else dict(failure.report)
    error: Value = dict(describe_error(failure.error))
    value: Value = [failure.peer, failure.host, failure.exit_code, failure.reason, report, failure.consequence, error, failure.pid]
    return unpack_value(pack_value(value))  # as it comes back: an error's attributes may be tuples


def failure_of_value(value: Any) -> Failure:
    """The failure that `value_of_failure` has returned."""
    peer, host, exit_code, reason, report, consequence, error, pid = value
    return Failure(peer, host, exit_code, reason, report, consequence, rebuild_error(error, peer), pid)
