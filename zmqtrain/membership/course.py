"""The course of a run: its states, who is gone, and what follows from that. Sans-IO: time is an argument.

What happens to the run comes in by `zmqtrain.membership.roster.Roster`; here is what it leads to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zmqtrain.errors import PeerLostError, PeerTimeoutError, ProtocolError, ZmqTrainError
from zmqtrain.membership.actions import Action, Answer, Discard, Drop, End, Failure, Note, Outcome, Push, Refuse, Ticket
from zmqtrain.membership.barrier import Barriers, name_some
from zmqtrain.membership.state import TRANSITIONS, Crew, Entry, Presence, State
from zmqtrain.membership.view import Member, View
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.timeouts import Ladder
from zmqtrain.wire.payload import Value

#: Longest address and reason that are kept.
LONGEST_TEXT = 1024


class Course:
    """A run's state, and the steps that lead from one to the next; each returns what to do. ``now`` is the loop's clock."""

    def __init__(self, expected: Iterable[Member], ladder: Ladder, *, now: float, elastic: bool = False) -> None:
        """``elastic``: the run goes on without workers that are lost, and with those that come back."""
        self.state = State.JOINING
        self.halt_reason: Mapping[str, Any] | None = None
        self.failures: list[Failure] = []
        self._elastic = elastic
        self._losses: list[str] = []  # without which the run went on
        self._told = 0  # the version of the newest view that everybody was told
        self._ladder = ladder
        self._crew = Crew(expected)
        self._heard: dict[str, float] = {}  # host -> when its agent was last heard
        self._joining: dict[PeerId, Ticket] = {}  # roles that wait for the complete view
        self._barriers = Barriers(ladder.barrier_s)
        self._version = 0
        self._complete = False
        self._join_deadline = now + ladder.join_s
        self._last_tick = now
        self._end_deadline: float | None = None
        self._end_reason = ""

    def view(self) -> View:
        """The members as they are now."""
        return self._crew.view(self._version, complete=self._complete)

    def is_here(self, peer: PeerId) -> bool:
        """Whether this peer is a member now."""
        entry = self._crew.get(peer)
        return entry is not None and entry.here

    # What follows -------------------------------------------------------------------------------------------------------------

    def _go(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state

    def _may_not(self, peer: PeerId) -> ZmqTrainError | None:
        if self.state is State.ENDED:
            return PeerLostError("coordinator", f"the run has ended: {self._end_reason}")
        entry = self._crew.get(peer)
        if entry is None or not entry.here:
            return ProtocolError(f"{peer} is not a member of this run")
        if not self._complete:
            return ProtocolError(f"{peer} must wait until everybody has joined")
        return None

    def _refuse_join(self, peer: PeerId, error: ZmqTrainError) -> list[Action]:
        ticket = self._joining.pop(peer, None)
        return [] if ticket is None else [Refuse(ticket, error)]

    def _discard_join(self, peer: PeerId, reason: str) -> list[Action]:
        ticket = self._joining.pop(peer, None)
        return [] if ticket is None else [Discard(ticket, reason)]

    def _maybe_complete(self) -> list[Action]:
        if self.state is not State.JOINING or len(self._crew.here()) < len(self._crew):
            return []
        self._complete = True
        self._version += 1
        self._told = self._version
        self._go(State.RUNNING)
        reason = f"all {len(self._crew)} have joined"
        value = self.view().to_value()
        answers: list[Action] = [Answer(ticket, value, reason) for ticket in self._joining.values()]
        self._joining.clear()
        return [Note("running", {"members": len(self._crew)}, reason), *answers]

    def _remove(self, entry: Entry, presence: Presence, reason: str) -> list[Action]:
        """A member is gone, in whichever way. Whoever waits for it is told."""
        if entry.here:
            self._version += 1
        entry.presence, entry.reason = presence, reason[:LONGEST_TEXT]
        peer = entry.member.peer
        if entry.member.kind == "agent":
            self._heard.pop(entry.member.host, None)
        actions = self._refuse_join(peer, PeerLostError(peer, reason))
        actions += self._barriers.give_up(peer, reason)
        if not self._complete and entry.member.is_role:
            # Everybody is still waiting for a view that will never be complete.
            for waiting in list(self._joining):
                actions += self._refuse_join(waiting, PeerLostError(peer, reason, waiting_for="everybody to join"))
        if presence is Presence.LOST:
            actions.append(Drop(peer, reason))
        return actions

    def _lose(self, entry: Entry, reason: str, error: ZmqTrainError, now: float) -> list[Action]:
        """A member is lost; with an agent all roles of its host."""
        actions = self._remove(entry, Presence.LOST, reason)
        if entry.member.kind == "agent":
            for other in self._crew.roles_of(entry.member.host):
                other.exited = True  # as far as anybody can tell
                if not other.gone:
                    actions += self._remove(other, Presence.LOST, f"its host {entry.member.host} is lost: {reason}")
        actions.append(Note("lost", {"peer": entry.member.peer, "host": entry.member.host, "reason": reason}, str(error)))
        peer, host = entry.member.peer, entry.member.host
        failure = Failure(peer, host, None, str(error), None, consequence=False, error=error)
        return actions + self._fail_or_go_on(entry, failure, now)

    def _fail_or_go_on(self, entry: Entry, failure: Failure, now: float) -> list[Action]:
        """Somebody is gone for good. An elastic run goes on without workers, as long as there are others, and as it is not their
        own fault."""
        roles = self._crew.roles_of(entry.member.host) if entry.member.kind == "agent" else [entry]
        survivable = self._elastic and self.state in (State.RUNNING, State.FINISHING) and not failure.of_user
        left = any(other.here or other.presence is Presence.LEFT for other in self._crew.of_kind("worker"))
        if not (survivable and left and all(role.member.kind == "worker" for role in roles)):
            return self._fail(failure, now)
        self._losses.append(failure.reason)
        values: dict[str, Any] = {"peer": failure.peer, "host": failure.host, "reason": failure.reason}
        noted = [] if failure.exit_code is None else [Note("lost", values, failure.reason)]
        return [*noted, *self._tell_view(failure.reason), *self._maybe_finish(now)]

    def _explain(self, failure: Failure) -> bool:
        """The process's own end says why its link was lost: that takes the place of the loss, where the run has failed by it."""
        for at, known in enumerate(self.failures):
            if known.peer == failure.peer and known.exit_code is None:
                self.failures[at] = failure
                self._end_reason = failure.reason if self._end_reason == known.reason else self._end_reason
                return True
        return False

    def _tell_view(self, reason: str, *, but: PeerId | None = None) -> list[Action]:
        """Everybody learns the view as it is now, and only that one counts."""
        self._told = self._version
        tell = [action for action in self._tell_all("view", self.view().to_value(), reason) if action.to != but]
        return [*self._barriers.outdate(self._version, reason), *tell]

    def _fail(self, failure: Failure, now: float) -> list[Action]:
        self.failures.append(failure)
        if self.state in (State.FAILED, State.ENDED):
            # Those who are still here need not know more, but a peer that is lost later must not be waited for either.
            return [*self._tell_all("view", self.view().to_value(), failure.reason), *self._maybe_end()]
        self._go(State.FAILED)
        self._end_reason, self._end_deadline = (
            failure.reason,
            now + 2 * self._ladder.grace_s,
        )  # one to end, one to be killed and reported
        halt: dict[str, Any] = {"kind": "failure", "peer": failure.peer, "message": failure.reason}
        actions: list[Action] = [Note("failed", {"peer": failure.peer, "reason": failure.reason}, failure.reason)]
        for waiting in list(self._joining):
            actions += self._refuse_join(waiting, PeerLostError(failure.peer, failure.reason, waiting_for="everybody to join"))
        # The view first: it ends the waits for the lost, so that a role is free to hear the rest.
        actions += self._tell_all("view", self.view().to_value(), failure.reason)
        actions += self._tell_all("halt", halt, failure.reason)
        return actions + self._maybe_end()

    def _tell_all(self, what: Any, value: Value, reason: str) -> list[Push]:
        return [Push(entry.member.peer, what, value, reason) for entry in self._crew.here()]

    def _maybe_finish(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.state in (State.JOINING, State.RUNNING) and all(entry.gone for entry in self._crew.of_kind("worker")):
            self._go(State.FINISHING)
            reason = "all workers have left"
            self._end_deadline = now + self._ladder.request_s
            actions.append(Note("finishing", {}, reason))
            servers = [entry.member.peer for entry in self._crew.of_kind("server", "fc") if not entry.gone]
            actions += [Push(server, "finish", None, reason) for server in servers]
        return actions + self._maybe_end()

    def _maybe_end(self) -> list[Action]:
        if self.state not in (State.FINISHING, State.FAILED):
            return []
        if not all(map(self._crew.ended, self._crew.of_kind("worker", "server", "fc"))):
            return []
        return self._end()

    def _end(self) -> list[Action]:
        failed = self.state is State.FAILED
        self._go(State.ENDED)
        self._end_deadline = None
        outcome = Outcome.of(self._end_reason if failed else None, self.failures, self.halt_reason, self._losses)
        self._end_reason = outcome.reason
        ended = PeerLostError("coordinator", f"the run has ended: {outcome.reason}")
        refusals: list[Action] = [Refuse(ticket, ended) for ticket in (*self._barriers.close(), *self._joining.values())]
        self._joining.clear()
        agents: list[Action] = [
            Push(agent.member.peer, "finish", None, outcome.reason) for agent in self._crew.agents.values() if agent.here
        ]
        return [*refusals, *agents, Note("ended", {"status": outcome.status}, outcome.reason), End(outcome, outcome.reason)]

    def _join_timed_out(self, now: float) -> list[Action]:
        missing = [entry for entry in self._crew if entry.presence is Presence.EXPECTED]
        named = name_some([entry.member.peer for entry in missing])
        error = PeerTimeoutError(named, f"everybody to join ({len(missing)} of {len(self._crew)} are missing)", self._ladder.join_s)
        actions: list[Action] = []
        for waiting in list(self._joining):
            actions += self._refuse_join(waiting, error)
        failure = Failure(missing[0].member.peer, missing[0].member.host, None, str(error), None, consequence=False, error=error)
        return actions + self._fail(failure, now)

    def _time_is_up(self, now: float) -> list[Action]:
        """The time for ending is over and somebody is still there."""
        if self.state is State.FAILED:
            return self._end()
        still = [entry for entry in self._crew if entry.member.is_role and not entry.gone]
        if not still:  # all have left; only their processes are slow to end, which is their agents' business
            return self._end()
        peers = name_some([entry.member.peer for entry in still])
        error = PeerTimeoutError(peers, "the end of the run", self._ladder.request_s)
        return self._fail(Failure(still[0].member.peer, still[0].member.host, None, str(error), None, False, error), now)
