"""Who may join a run, and as what: a pure function of the member's entry and the state of the run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zmqtrain.errors import RUN_HAD_ENDED, PeerLostError, ProtocolError, TooLateError, UsageError, ZmqTrainError
from zmqtrain.membership.state import Entry, Presence, State


class JoinMode(Enum):
    """How a process joins."""

    FIRST = "first"
    """As one of those with which the run begins, or repeating its request; an agent or observer at any time."""
    INSTEAD = "instead"
    """In the place of another process of its name, which had asked before all had joined."""
    LATE = "late"
    """A run in progress, in the place of a member that is lost or counts as lost now, or in one that was free."""


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """The process may not join."""

    error: ZmqTrainError
    is_lost: bool = False
    """Whether the member counts as lost now: its process is another one, and the run cannot continue without its state."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The state of the run, as far as it decides who may join."""

    state: State
    elastic: bool
    """Whether the run continues without members that are lost."""
    replaces_servers: bool
    """Whether that holds for model servers, too."""
    replaces_fc: bool
    """And for the FC server."""
    stopped: bool
    """Whether a role has stopped the run before all had joined."""
    servers_have_ended: bool
    """Whether what was trained was on model servers, of which one has ended."""
    training_has_ended: bool
    """Whether workers of an elastic run that does well have left since all was trained."""
    agent: Entry | None
    """The agent of the member's host."""
    end_reason: str


def decide_join(entry: Entry, incarnation: int, run: Circumstances) -> JoinMode | JoinRefused:
    """Decide about a request to join.

    Args:
        entry: the member's.
        incarnation: the number of the process that asks.
        run: what else matters.
    """
    member, presence = entry.member, entry.presence
    if run.elastic and member.kind == "worker" and (presence is Presence.LEFT or (entry.gone and run.servers_have_ended)):
        why = "model servers have ended" if run.servers_have_ended else "it has left already"
        return JoinRefused(TooLateError(member.peer, why))
    if run.training_has_ended and member.kind == "worker" and entry.incarnation != incarnation:
        return JoinRefused(TooLateError(member.peer, RUN_HAD_ENDED))
    servers = [kind for kind, may_go in (("server", run.replaces_servers), ("fc", run.replaces_fc)) if may_go]
    replaced = ("worker", "agent", *servers)
    in_progress = run.elastic and run.state is State.RUNNING and not run.stopped and member.kind in replaced
    if in_progress and presence in (Presence.HERE, Presence.LOST, Presence.ABSENT) and entry.incarnation != incarnation:
        if presence is Presence.ABSENT and member.is_role and run.agent is not None and not run.agent.here:
            reason = f"its agent must join before it: {run.agent.member.peer} has not joined"
            return JoinRefused(PeerLostError(member.peer, reason))
        return JoinMode.LATE
    if presence is Presence.ABSENT and run.state is State.JOINING:
        return JoinRefused(UsageError(f"{member.peer} may join once all members with which the run begins have joined"))
    if presence in (Presence.LOST, Presence.ABSENT) or run.state in (State.FAILED, State.ENDED) or run.stopped:
        if run.elastic and run.state is State.FINISHING and member.kind == "worker":
            return JoinRefused(TooLateError(member.peer, "the others have trained all there was"))
        why = entry.reason or run.end_reason or "the run was stopped"
        return JoinRefused(PeerLostError(member.peer, f"it is too late to join: {why}"))
    if presence is not Presence.EXPECTED and entry.incarnation != incarnation:
        if member.kind != "observer" and run.state is not State.JOINING:
            return JoinRefused(PeerLostError(member.peer, "it came back as another process, and its state is lost"), is_lost=True)
        return JoinMode.INSTEAD
    if presence is Presence.LEFT:
        return JoinRefused(ProtocolError(f"{member.peer} has left already"))
    return JoinMode.FIRST
