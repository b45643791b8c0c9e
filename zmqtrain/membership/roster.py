"""The coordinator's mind: who is in the run, in which state the run is, and what follows. Sans-IO: time is an argument.

The life of a run::

    joining ──all expected joined──▶ running ──all workers left──▶ finishing ──all gone──▶ ended
       │                                │                              │                     ▲
       └────────── a failure ───────────┴───────▶ failed ◀─────────────┘                     │
                                                     └──all exited, or the grace time over───┘

A role is judged by its agent's word (heartbeats that name the living, reports of exits) and never by its own silence: a process
whose GIL is held for a minute is healthy. An agent is judged by its silence. Roles without an agent (embedded in another program)
are judged by the endpoint, which notices a link that stays away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zmqtrain.errors import HostLostError, PeerLostError, ProtocolError, UsageError, ViewChangedError, ZmqTrainError
from zmqtrain.membership.actions import Action, Answer, Drop, Failure, Meet, Note, Refuse, Ticket
from zmqtrain.membership.barrier import name_some
from zmqtrain.membership.course import LONGEST_TEXT, Course
from zmqtrain.membership.state import Entry, Presence, State
from zmqtrain.membership.view import Member
from zmqtrain.net.address import without_key
from zmqtrain.net.endpoint import PeerId

#: Processes that only watch.
MOST_OBSERVERS = 64


class Roster(Course):
    """Decides; each method takes what happened and returns what to do. ``now`` is the loop's clock and never goes back."""

    # What happened ------------------------------------------------------------------------------------------------------------

    def handle_join(self, peer: PeerId, incarnation: int, address: str, ticket: Ticket, now: float) -> list[Action]:
        """A process wants in. Roles are answered when everybody is there, agents and observers at once."""
        entry = self._crew.get(peer)
        if entry is None:
            if not peer.startswith("observer/"):
                expected = name_some([other.member.peer for other in self._crew.of_kind("agent", "worker", "server", "fc")])
                return [Refuse(ticket, ProtocolError(f"{peer} is not part of this run, which expects {expected}"))]
            if len(self._crew.of_kind("observer")) >= MOST_OBSERVERS:
                return [Refuse(ticket, UsageError(f"{peer} cannot watch: {MOST_OBSERVERS} observers are here already"))]
            entry = self._crew.add(Member(peer, "", "", "observer", -1))
        stopped = self.halt_reason is not None and not self._complete
        again = self._elastic and self.state is State.RUNNING and entry.member.kind in ("worker", "agent")
        if again and entry.presence in (Presence.HERE, Presence.LOST) and entry.incarnation != incarnation and not stopped:
            return self._join_again(entry, incarnation, address, ticket, now)
        if entry.presence is Presence.LOST or self.state in (State.FAILED, State.ENDED) or stopped:
            why = entry.reason or self._end_reason or "the run was stopped"
            return [Refuse(ticket, PeerLostError(peer, f"it is too late to join: {why}"))]
        actions: list[Action] = []
        if entry.presence is not Presence.EXPECTED and entry.incarnation != incarnation:
            if entry.member.kind != "observer" and self.state is not State.JOINING:
                reason = "it came back as another process; what it knew is gone"
                error = PeerLostError(peer, reason)
                return [Refuse(ticket, error), *self._lose(entry, reason, error, now)]
            actions += self._discard_join(peer, f"another process has joined as {peer}")
        elif entry.presence is Presence.LEFT:
            return [Refuse(ticket, ProtocolError(f"{peer} has left already"))]
        changed = not entry.here or entry.incarnation != incarnation or entry.member.address != address
        entry.welcome(incarnation, address[:LONGEST_TEXT])
        if entry.member.kind == "agent":
            self._heard[entry.member.host] = now
        if changed:
            self._version += 1
            values: dict[str, Any] = {"peer": peer, "host": entry.member.host, "address": without_key(address)}
            reason = f"{peer} joined ({len(self._crew.here())} of {len(self._crew)})"
            actions += [Meet(peer, entry.member.address, reason), Note("join", values, reason)]
        if entry.member.is_role and not self._complete:
            gone = next((other for other in self._crew if other.gone), None)
            if gone is not None:
                error = PeerLostError(gone.member.peer, gone.reason, waiting_for="everybody to join")
                return [*actions, Refuse(ticket, error)]
            actions += self._refuse_join(peer, ProtocolError(f"{peer} has asked again"))
            self._joining[peer] = ticket
            return actions + self._maybe_complete()
        return [*actions, Answer(ticket, self.view().to_value(), f"{peer} needs to wait for nobody"), *self._maybe_complete()]

    def _join_again(self, entry: Entry, incarnation: int, address: str, ticket: Ticket, now: float) -> list[Action]:
        """Another process under the name of a worker that was lost, or is lost by that: it takes part in what is under way."""
        peer, actions = entry.member.peer, []
        if entry.here:
            reason = "it came back as another process"
            self._losses.append(f"{peer}: {reason}")
            actions += [*self._remove(entry, Presence.LOST, reason), Note("lost", {"peer": peer}, f"{peer}: {reason}")]
        entry.welcome(incarnation, address[:LONGEST_TEXT], ready=not entry.member.is_role)
        entry.exited = False
        if entry.member.kind == "agent":
            self._heard[entry.member.host] = now
        self._version += 1
        reason = f"{peer} joined the run under way"
        values: dict[str, Any] = {"peer": peer, "host": entry.member.host, "address": without_key(address), "late": True}
        actions += [Meet(peer, entry.member.address, reason), Note("join", values, reason), *self._tell_view(reason, but=peer)]
        view = self.view().to_value()
        assert isinstance(view, dict)
        return [*actions, Answer(ticket, {**view, "late": True}, reason)]

    def handle_ready(self, peer: PeerId, ticket: Ticket, now: float) -> list[Action]:
        """A worker that has joined a run under way can take part from now on."""
        error, entry = self._may_not(peer), self._crew.get(peer)
        if error is not None or entry is None:
            return [Refuse(ticket, error or ProtocolError(f"{peer} is not a member of this run"))]
        entry.member = replace(entry.member, ready=True)
        self._version += 1
        reason = f"{peer} is ready to take part"
        return [*self._tell_view(reason, but=peer), Answer(ticket, self.view().to_value(), reason)]

    def handle_agree(
        self, peer: PeerId, name: str, value: int, members: Sequence[PeerId], version: int | None, ticket: Ticket, now: float
    ) -> list[Action]:
        """A member brings its value to an agreement. ``version``: the view that it is about; it ends with it."""
        error = self._may_not(peer)
        if error is None and version is not None and version < self._told:
            error = ViewChangedError(f"the members have changed: view {self._told} is the newest, not {version}")
        if error is not None:
            return [Refuse(ticket, error)]
        who = tuple(sorted(set(members)))
        refused = self._not_all_here(peer, who, f"the agreement {name!r}")
        if refused is not None:
            return [Refuse(ticket, refused)]
        return self._barriers.arrive(peer, f"agree/{name}", who, ticket, now, value=value, version=version)

    def _not_all_here(self, peer: PeerId, who: Sequence[PeerId], what: str) -> ZmqTrainError | None:
        known = [entry for other in who if (entry := self._crew.get(other)) is not None]
        unknown = sorted({*who} - {entry.member.peer for entry in known})
        if unknown or peer not in who:
            why = f"with {name_some(unknown)}, not part of this run" if unknown else "without being one of its members"
            return UsageError(f"{peer} calls {what} {why}")
        gone = next((entry for entry in known if entry.gone), None)
        return None if gone is None else PeerLostError(gone.member.peer, gone.reason, waiting_for=what)

    def handle_barrier(self, peer: PeerId, name: str, members: Sequence[PeerId] | None, ticket: Ticket, now: float) -> list[Action]:
        """A member is at a barrier; without ``members`` it is one of all workers."""
        error = self._may_not(peer)
        if error is not None:
            return [Refuse(ticket, error)]
        workers = [other for other in self._crew.of_kind("worker") if not self._elastic or other.here]
        who = tuple([other.member.peer for other in workers] if members is None else sorted(set(members)))
        refused = self._not_all_here(peer, who, f"the barrier {name!r}")
        if refused is not None:
            return [Refuse(ticket, refused)]
        return self._barriers.arrive(peer, name, who, ticket, now, everybody=self._elastic and members is None)

    def handle_heartbeat(self, peer: PeerId, alive: Iterable[PeerId], now: float) -> list[Action]:
        """An agent's word: its host is there, and these of its roles are alive."""
        entry = self._crew.get(peer)
        if entry is None or entry.member.kind != "agent" or not entry.here:
            return []
        self._heard[entry.member.host] = now
        living = set(alive)
        actions: list[Action] = []
        for other in self._crew.roles_of(entry.member.host):
            if other.here and not other.exited and other.member.peer not in living:
                reason = f"its agent on {entry.member.host} no longer sees its process"
                error = HostLostError(f"{other.member.peer}: {reason}")
                actions += self._lose(other, reason, error, now)
        return actions

    def handle_exited(
        self,
        agent: PeerId,
        peer: PeerId,
        exit_code: int,
        report: Mapping[str, Any] | None,
        *,
        stopped: bool,
        now: float,
        pid: int | None = None,
    ) -> list[Action]:
        """An agent reports that a role's process has ended, and its number. ``stopped``: the agent ended it on purpose."""
        entry, judge = self._crew.get(peer), self._crew.get(agent)
        if entry is None or judge is None or judge.member.kind != "agent" or judge.member.host != entry.member.host or entry.exited:
            return []
        self._heard[judge.member.host] = now
        entry.exited = True
        left = entry.presence is Presence.LEFT
        never_joined = entry.presence is Presence.EXPECTED and not self._joining
        values: dict[str, Any] = {"peer": peer, "host": entry.member.host, "exit_code": exit_code}
        actions: list[Action] = [Note("exit", values, f"{peer} exited with code {exit_code}")]
        if exit_code == 0 and report is None and (left or never_joined):
            # A script that never joins is no failure as long as nobody waits for it.
            if not left:
                actions += self._remove(entry, Presence.LEFT, "it ended without joining")
            return actions + self._maybe_finish(now)
        if any(failure.peer == peer and failure.report is not None for failure in self.failures):
            return actions + self._maybe_end()  # it has said so itself
        failure = Failure.of_exit(peer, entry.member.host, exit_code, report, stopped=stopped, left=left, pid=pid)
        if self._explain(failure):
            return actions + self._maybe_end()
        if self._elastic and entry.presence is Presence.LOST and not failure.of_user:
            return actions + self._maybe_end()  # the run goes on without it already
        if entry.presence is not Presence.LOST:
            actions += self._remove(entry, Presence.LOST, failure.reason)
        return actions + self._fail_or_go_on(entry, failure, now)

    def handle_failed(self, peer: PeerId, report: Mapping[str, Any], now: float) -> list[Action]:
        """A role says itself that it failed. Needed where it has no agent that would see its process end."""
        entry = self._crew.get(peer)
        if entry is None or not entry.here:
            return []
        code = report.get("exit_code")
        exit_code = code if isinstance(code, int) else 1
        failure = Failure.of_exit(peer, entry.member.host, exit_code, report, stopped=False, left=False)
        gone = self._remove(entry, Presence.LOST, failure.reason)
        # Its process is still there, and waits for the answer to this very call: no wait for it is given up here.
        return [*(action for action in gone if not isinstance(action, Drop)), *self._fail_or_go_on(entry, failure, now)]

    def handle_leave(self, peer: PeerId, now: float) -> list[Action]:
        """A member has done its work and goes. Nobody else is told: what it has sent is still on its way to them."""
        entry = self._crew.get(peer)
        if entry is None or not entry.here:
            return []
        waited = [other for other in self._crew.roles_of(entry.member.host) if other.here]
        if entry.member.kind == "agent" and waited and self.state is not State.ENDED:
            reason = f"the agent of {entry.member.host} left before its roles"
            return self._lose(entry, reason, HostLostError(reason), now)
        actions = self._remove(entry, Presence.LEFT, "it left")
        if entry.member.kind == "observer":
            self._crew.remove(peer)
        actions.append(Note("leave", {"peer": peer}, f"{peer} left"))
        return actions + self._maybe_finish(now)

    def handle_halt(self, peer: PeerId, reason: Mapping[str, Any], now: float) -> list[Action]:
        """A role asks to stop the run. Everybody is told, once; they leave by themselves."""
        if self.halt_reason is not None or self.state in (State.FAILED, State.ENDED):
            return []
        if peer != "coordinator" and self._may_not(peer) is not None:
            return []
        self.halt_reason = dict(reason)
        told = f"{peer} stops the run: {reason.get('message', 'no reason given')}"
        values: dict[str, Any] = {"peer": peer, "reason": dict(reason)}
        actions: list[Action] = [Note("halt", values, told)]
        for waiting in list(self._joining):
            actions += self._refuse_join(waiting, PeerLostError(peer, told, waiting_for="everybody to join"))
        return [*actions, *self._tell_all("halt", {"kind": "halt", "peer": peer, **reason}, told)]

    def handle_lost(self, peer: PeerId, reason: str, now: float) -> list[Action]:
        """The endpoint has lost its link to a peer. Says nothing about a role that has an agent, unless others can go on without
        it: then a process that stands still is not waited for."""
        entry = self._crew.get(peer)
        if entry is None or not entry.here or self.state is State.ENDED:
            return []
        if entry.member.kind == "observer":
            self._crew.remove(peer)
            return []
        if entry.member.kind == "agent":
            return self._lose(entry, reason, HostLostError(f"lost the host {entry.member.host}: {reason}"), now)
        vouched_for = entry.member.host in self._crew.agents
        if vouched_for and not (self._elastic and self.state is State.RUNNING and entry.member.kind == "worker"):
            return []  # nobody can go on without it, and its agent says whether it will be back
        if self.state is State.JOINING:  # it may come back as another process; if not, the join time-out names it
            entry.presence, self._version = Presence.EXPECTED, self._version + 1
            return self._discard_join(peer, reason)
        return self._lose(entry, reason, HostLostError(f"lost {peer} on {entry.member.host}: {reason}"), now)

    def handle_host_ended(self, host: str, reason: str, now: float) -> list[Action]:
        """Whoever started a host's agent says that it has ended. Says nothing about an agent that has left."""
        entry = self._crew.agents.get(host)
        if entry is None or entry.gone or self.state is State.ENDED:
            return []
        return self._lose(entry, reason, HostLostError(f"lost the host {host}: {reason}"), now)

    # Time ---------------------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest; ``None`` once the run has ended."""
        if self.state is State.ENDED:
            return None
        deadlines = self._barriers.deadlines()
        if self.state is State.JOINING:
            deadlines.append(self._join_deadline)
        if self._end_deadline is not None:
            deadlines.append(self._end_deadline)
        if self._heard:
            # Also once a heartbeat, so that `tick` notices when this very process has been standing still.
            deadlines += [min(self._heard.values()) + self._ladder.lost_s, self._last_tick + self._ladder.heartbeat_s]
        return min(deadlines, default=None)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        stood_still = now - self._last_tick - self._ladder.heartbeat_s
        self._last_tick = now
        if self._heard and stood_still > self._ladder.lost_s / 2:
            # It was we who stood still (a suspended machine, a stopped process): the agents' words wait unread.
            self._heard = dict.fromkeys(self._heard, now)
        actions: list[Action] = []
        for host, heard in list(self._heard.items()):
            if now >= heard + self._ladder.lost_s and self.state is not State.ENDED:
                reason = f"its agent has been silent for {self._ladder.lost_s:g} s"
                actions += self._lose(self._crew.agents[host], reason, HostLostError(f"lost the host {host}: {reason}"), now)
        actions += self._barriers.tick(now)
        if self.state is State.JOINING and now >= self._join_deadline:
            actions += self._join_timed_out(now)
        if self._end_deadline is not None and now >= self._end_deadline:
            actions += self._time_is_up(now)
        return actions
