"""The coordinator's state machine: the members, the state of the run, and what follows. Sans-IO: time is an argument.

The life of a run::

    joining ──all expected joined──▶ running ──all workers left──▶ finishing ──all gone──▶ ended
       │                                │                              │                     ▲
       └────────── a failure ───────────┴───────▶ failed ◀─────────────┘                     │
                                                     └──all exited, or the grace time over───┘

A role is judged by its agent's messages (heartbeats that name the living roles, reports of exits), and by its link, which threads
without a GIL keep alive: a process whose GIL is held for a minute is healthy, and one whose link stays broken although it has not
ended stands still. An agent is judged by its silence. Roles without an agent (embedded in another program) are judged by the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zmqtrain.errors import (
    HostLostError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    UsageError,
    ZmqTrainError,
)
from zmqtrain.membership.actions import (
    Action,
    Answer,
    Discard,
    Drop,
    End,
    Failure,
    Meet,
    Note,
    Outcome,
    Push,
    Refuse,
    Ticket,
)
from zmqtrain.membership.barrier import Barriers, name_some
from zmqtrain.membership.chains import Chains
from zmqtrain.membership.heard import Heard
from zmqtrain.membership.join_decision import Circumstances, JoinMode, JoinRefused, decide_join
from zmqtrain.membership.joins import Joins
from zmqtrain.membership.ledger import MEMBER, OPENED, RUN, restore_entry, value_of_entry
from zmqtrain.membership.member_barriers import MemberBarriers
from zmqtrain.membership.rifts import Life, Rifts
from zmqtrain.membership.run_status import RunStatus
from zmqtrain.membership.shards import Shards
from zmqtrain.membership.state import Entry, MemberTable, Presence, State
from zmqtrain.membership.touch import given_up
from zmqtrain.membership.view import Member, View
from zmqtrain.net.address import without_key
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.wire.payload import Value

#: The most processes that only observe.
MOST_OBSERVERS = 64
#: The most heartbeats a second, of all agents together. Between them agents of large runs only show that they are there.
MOST_HEARTBEATS = 100
#: The longest address and reason that are kept.
LONGEST_TEXT = 1024
#: Why a worker has left that has done its work.
DONE = "it left"
#: Why a worker has left that has trained nothing.
CAME_TOO_LATE = "it came when the others had trained all there was"


class Roster:
    """A run's state machine: each method takes an event and returns actions.

    ``now`` is the loop's clock and never goes back."""

    def __init__(
        self,
        expected: Iterable[Member],
        timeouts: Timeouts,
        *,
        now: float,
        elastic: bool = False,
        lasting: bool = False,
        patient: bool = False,
        whole_groups: bool = False,
        chains: Chains | None = None,
        copies: bool = True,
        ledger: Mapping[str, Any] | None = None,
        spare: Iterable[Member] = (),
    ) -> None:
        """``elastic``: the run continues without workers that are lost, and admits workers that come back. ``lasting``: it does
        so even if all are lost for a while, since what they have trained is on model servers. ``whole_groups``: no worker of a
        group can train without the others, so all of them are lost at once, and ready at once. ``chains``: without model servers
        that are lost, too, as long as each shard is left on one. ``copies``: each shard is to be on two. ``patient``: members may
        lose touch with the coordinator for a while, so that a broken link alone does not say that one is lost. ``ledger``: what
        another roster of this run has left (`ledger`), of a run in which all had joined; this one goes on from there. ``spare``:
        members that may come once the run has begun."""
        self._run = RunStatus(timeouts)
        self._elastic, self._lasting, self._patient = elastic, lasting, patient
        self._whole_groups = whole_groups
        self._lost_with_it: list[Note] = []  # those that were lost because another one was, until that has been noted
        self._ready: dict[PeerId, Ticket] = {}  # workers that could take part, if others of their group could, too
        self._told = 0  # the version of the newest view that was sent to all
        self._timeouts = timeouts
        self._members = MemberTable(expected, spare)
        self._shards = Shards(chains or Chains(), self._members, copies=copies)
        self._heard = Heard(timeouts, now)
        self._joining = Joins()
        self._barriers = Barriers(timeouts.barrier_s)
        self._meetings = MemberBarriers(self._members, self._barriers)
        self._rifts = Rifts(timeouts.grace_s)
        self._version = 0
        self._changes = 0  # of those that can take part, since all had joined
        self._complete = False
        self._trained = False  # workers of an elastic run leave, since all was trained
        self._late: set[PeerId] = set()  # workers that have come when the others trained, as far as this roster has seen it
        self._join_deadline = now + timeouts.join_s
        if ledger is not None:
            self._restore(ledger, now)

    def ledger(self) -> dict[str, Value]:
        """What must not be forgotten: the members, the state of the run and what was decided."""
        run: list[Value] = [self.state.value, self._version, self._told, self._complete, self._run.end_reason, self._elastic]
        members = {f"{MEMBER}{entry.member.peer}": value_of_entry(entry) for entry in self._members if not entry.is_observer}
        opened = {f"{OPENED}{name}": value for name, value in self._barriers.opened().items()}
        return {RUN: [*run, *self._run.reasons(), self._changes], **self._shards.ledger(), **members, **opened}

    def _restore(self, ledger: Mapping[str, Any], now: float) -> None:
        state, version, told, complete, end_reason, self._elastic, *reasons, changes = ledger[RUN]
        self._version, self._told, self._complete, self._changes = version, told, complete, changes
        self._shards.restore(ledger)
        self._run.restore(state, end_reason, reasons, now)
        for entry in self._members:
            restore_entry(entry, ledger[f"{MEMBER}{entry.member.peer}"])
        workers = self._members.of_kind("worker")
        self._trained = self._elastic and any(each.presence is Presence.LEFT and each.reason == DONE for each in workers)
        for name, value in ledger.items():
            if name.startswith(OPENED):
                self._barriers.remember(name.removeprefix(OPENED), value)
        self._heard.restore([host for host, entry in self._members.agents.items() if entry.here], now)
        for entry in self._members:
            # One that stands still since before has never had a link to this roster, whose loss would tell.
            if entry.here and entry.member.is_role and self._members.is_watched(entry):
                entry.cut = (now + self._timeouts.request_s, "it has not come back to the launcher that has taken over")
        if not self._run.is_over and self.state is not State.FINISHING and self._elastic and not self._some_left():
            reason = "all workers were lost before another launcher took over"
            error = HostLostError(reason)
            lost = self._members.of_kind("worker")[0].member
            failure = Failure(lost.peer, lost.host, None, reason, None, consequence=False, error=error)
            self._run.wait_longer_for_a_worker(failure, now)

    @property
    def state(self) -> State:
        """The state of the run."""
        return self._run.state

    @property
    def failures(self) -> Sequence[Failure]:
        """All of them so far, the first one first."""
        return self._run.failures

    @property
    def halt_reason(self) -> Mapping[str, Any] | None:
        """Why a role has stopped the run, if one has."""
        return self._run.halt_reason

    def ended(self) -> Outcome | None:
        """How the run has ended, if it has."""
        return self._run.ended()

    def agents_here(self, *, late: bool = False) -> bool:
        """Whether an agent has not left yet. ``late``: one of those that have come once the run had begun."""
        hosts = self._members.spare_hosts if late else self._members.agents
        return any(self._members.agents[host].here for host in hosts if host in self._members.agents)

    def met(self) -> list[Action]:
        """The members that another roster had welcomed: their addresses, and the view. Who is told it and is not there is missed,
        also if it has no agent that could tell."""
        reason = "it had joined before another launcher took over"
        meet = [Meet(entry.member.peer, entry.member.address, reason) for entry in self._members.here() if entry.member.address]
        return [*meet, *self._tell_all("view", self.view().to_value(), reason)]

    @property
    def version(self) -> int:
        """The version of the current view."""
        return self._version

    def view(self) -> View:
        """The members as they are now."""
        view = self._members.view(self._version, complete=self._complete)
        return self._shards.view(replace(view, changes=self._changes))

    def is_here(self, peer: PeerId) -> bool:
        """Whether this peer is a member now."""
        entry = self._members.get(peer)
        return entry is not None and entry.here

    # What happened ------------------------------------------------------------------------------------------------------------

    def handle_join(self, peer: PeerId, incarnation: int, address: str, ticket: Ticket, now: float) -> list[Action]:
        """A process asks to join. Roles get an answer when all have joined, agents and observers at once."""
        entry = self._members.get(peer)
        if entry is None:
            if not peer.startswith("observer/"):
                expected = name_some([other.member.peer for other in self._members.of_kind("agent", "worker", "server", "fc")])
                return [Refuse(ticket, ProtocolError(f"{peer} is not part of this run, which expects {expected}"))]
            if len(self._members.of_kind("observer")) >= MOST_OBSERVERS:
                return [Refuse(ticket, UsageError(f"{peer} cannot join: there are {MOST_OBSERVERS} observers already"))]
            entry = self._members.add(Member(peer, "", "", "observer", -1))
        decision = decide_join(entry, incarnation, self._circumstances(entry))
        if isinstance(decision, JoinRefused):
            refused: list[Action] = [Refuse(ticket, decision.error)]
            if decision.is_lost:
                reason = "it came back as another process, and its state is lost"
                refused += self._lose(entry, reason, decision.error, now)
            return refused
        if decision is JoinMode.LATE:
            return self._join_late(entry, incarnation, address, ticket, now)
        actions: list[Action] = []
        if decision is JoinMode.INSTEAD:
            actions += self._joining.discard(peer, f"another process has joined as {peer}")
        changed = not entry.here or entry.incarnation != incarnation or entry.member.address != address
        entry.welcome(incarnation, address[:LONGEST_TEXT])
        if entry.member.kind == "agent":
            self._heard.note(entry.member.host, now)
        if changed:
            self._version += 1
            values: dict[str, Any] = {"peer": peer, "host": entry.member.host, "address": without_key(address)}
            reason = f"{peer} joined ({self._members.count_here()} of {len(self._members)})"
            actions += [Meet(peer, entry.member.address, reason), Note("join", values, reason)]
        if entry.member.is_role and not self._complete:
            gone = self._members.one_gone()
            if gone is not None:
                error = PeerLostError(gone.member.peer, gone.reason, waiting_for="all members to join")
                return [*actions, Refuse(ticket, error)]
            actions += self._joining.refuse(peer, ProtocolError(f"{peer} has asked again"))
            self._joining.wait(peer, ticket)
            return actions + self._maybe_complete()
        # An agent needs no other members: to tell each of the thousands that have come so far would take minutes.
        alone = entry.member.kind == "agent" and not self._complete
        known = View(self._version, False, {peer: entry.member}, {}) if alone else self.view()
        return [
            *actions,
            Answer(ticket, known.to_value(), f"{peer} does not have to wait for others"),
            *self._maybe_complete(),
        ]

    def _circumstances(self, entry: Entry) -> Circumstances:
        ended = any(server.presence is Presence.LEFT for server in self._members.of_kind("server"))
        return Circumstances(
            state=self.state,
            elastic=self._elastic,
            replaces_servers=bool(self._shards),
            replaces_fc=self._shards.chained("fc"),
            stopped=self.halt_reason is not None and not self._complete,
            servers_have_ended=self._lasting and ended,
            training_has_ended=self._trained and not self.failures,
            agent=self._members.agents.get(entry.member.host),
            end_reason=self._run.end_reason,
        )

    def _join_late(self, entry: Entry, incarnation: int, address: str, ticket: Ticket, now: float) -> list[Action]:
        """A new process joins under the name of a worker that was lost, or that counts as lost now: it takes part in the run in
        progress."""
        peer = entry.member.peer
        actions: list[Action] = []
        if entry.here and (entry.member.kind == "agent" or self._shards.chained(entry.member.kind)):
            # With an agent, its roles are lost; with a server, what it had of the model may be.
            error = PeerLostError(peer, "it came back as another process")
            actions += self._lose(entry, error.reason, error, now)
            if self.state is not State.RUNNING:
                return [Refuse(ticket, error), *actions]
        if entry.here:
            reason = "it came back as another process"
            self._run.losses.append(f"{peer}: {reason}")
            actions += [*self._remove(entry, Presence.LOST, reason), Note("lost", {"peer": peer}, f"{peer}: {reason}")]
            others = self._note_others()
            self._run.losses += [each.reason for each in others]
            actions += others
        entry.welcome(incarnation, address[:LONGEST_TEXT], ready=not entry.member.is_role)
        entry.exited = False
        if entry.member.kind == "worker":
            self._late.add(peer)
            if not self._whole_groups:  # otherwise it waits for the others of its group
                self._run.a_worker_is_here()
        if entry.member.kind == "agent":
            self._heard.note(entry.member.host, now)
        self._version += 1
        reason = f"{peer} joined the run in progress"
        values: dict[str, Any] = {"peer": peer, "host": entry.member.host, "address": without_key(address), "late": True}
        actions += [Meet(peer, entry.member.address, reason), Note("join", values, reason), *self._tell_view(reason, but=peer)]
        view = self.view().to_value()
        assert isinstance(view, dict)
        return [*actions, Answer(ticket, {**view, "late": True}, reason)]

    def handle_again(self, peer: PeerId, incarnation: int, ticket: Ticket, now: float) -> list[Action]:
        """A member had lost touch, perhaps because another process was the coordinator. It gets what it may have missed: the view,
        why the run must stop, and whether it is to finish."""
        entry = self._members.get(peer)
        if entry is None or entry.incarnation != incarnation or entry.presence in (Presence.EXPECTED, Presence.LOST):
            why = "it is not a member of this run" if entry is None else entry.reason or "another process has taken its place"
            return [Refuse(ticket, given_up(peer, why))]
        entry.cut = None
        if entry.member.kind == "agent":
            if entry.here:
                self._heard.note(entry.member.host, now)
            finish = self.state is State.ENDED
        elif entry.member.kind == "worker":
            finish = self._trained
        else:
            finish = self.state in (State.FINISHING, State.ENDED)
        missed: dict[str, Value] = {"view": self.view().to_value(), "halt": self._run.halt_told, "finish": finish}
        return [Answer(ticket, missed, f"{peer} is back in touch")]

    def handle_ready(self, peer: PeerId, ticket: Ticket, now: float) -> list[Action]:
        """A worker that has joined a run in progress can take part from now on."""
        error, entry = self._may_not(peer), self._members.get(peer)
        if error is not None or entry is None:
            return [Refuse(ticket, error or ProtocolError(f"{peer} is not a member of this run"))]
        before = self._ready.pop(peer, None)
        repeated: list[Action] = [] if before is None else [Discard(before, f"{peer} has asked again")]
        self._ready[peer] = ticket
        late = [other for other in self._group_of(entry) if not (other.here and other.member.ready)]
        if any(other.member.peer not in self._ready for other in late):
            return repeated  # the last one of its group tells all
        self._version += 1
        self._run.a_worker_is_here()
        answered = {peer: ticket}
        for other in late:
            self._changes += other.member.kind == "worker"
            other.member = replace(other.member, ready=True)
            answered[other.member.peer] = self._ready.pop(other.member.peer)
        self._ready.pop(peer, None)
        reason = f"{name_some(list(answered))} {'is' if len(answered) == 1 else 'are'} ready to take part"
        value = self.view().to_value()
        told = [action for action in self._tell_view(reason) if not (isinstance(action, Push) and action.to in answered)]
        return [*repeated, *told, *(Answer(each, value, reason) for each in answered.values())]

    def handle_backup(self, head: PeerId, shard: int, backup: PeerId, ticket: Ticket, now: float) -> list[Action]:
        """The server of a shard says that another one has an equal copy from now on."""
        return self._change_shard(head, ticket, lambda: self._shards.add_backup(shard, head, backup))

    def handle_hand_over(self, head: PeerId, shard: int, to: PeerId, ticket: Ticket, now: float) -> list[Action]:
        """The server of a shard gives it to its backup, which has an equal copy."""
        return self._change_shard(head, ticket, lambda: self._shards.hand_over(shard, head, to))

    def handle_without_backup(self, head: PeerId, shard: int, backup: PeerId, ticket: Ticket, now: float) -> list[Action]:
        """The server of a shard needs this backup no more."""
        return self._change_shard(head, ticket, lambda: self._shards.do_without(shard, head, backup))

    def _change_shard(self, head: PeerId, ticket: Ticket, change: Callable[[], Note | str | ZmqTrainError]) -> list[Action]:
        """What the server of a shard says of it: all others hear of it, unless it was so already."""
        changed = self._may_not(head) or change()
        if isinstance(changed, ZmqTrainError):
            return [Refuse(ticket, changed)]
        if isinstance(changed, str):
            return [Answer(ticket, self.view().to_value(), changed)]
        self._version += 1
        told = self._tell_view(changed.reason, but=head)
        return [changed, *told, Answer(ticket, self.view().to_value(), changed.reason)]

    def handle_leaving(self, servers: Sequence[PeerId], now: float) -> list[Action]:
        """These model servers are to leave: what they have of the model goes to others."""
        self._shards.leave(servers)
        self._version += 1
        return self._tell_view(f"{name_some(list(servers))} {'is' if len(servers) == 1 else 'are'} to leave")

    def handle_agree(
        self,
        peer: PeerId,
        name: str,
        value: int,
        members: Sequence[PeerId],
        version: int | None,
        ticket: Ticket,
        now: float,
        call: int | None = None,
        processes: Mapping[PeerId, int] | None = None,
    ) -> list[Action]:
        """A member gives its value for an agreement. ``version``: the view that it is about; a newer view ends it. ``call``: the
        member's number of this call; one that is repeated gets the answer that it had. ``processes``: the incarnations of members,
        of which nobody can be waited for in whose place there is another process."""
        known = self._barriers.answered(f"agree/{name}", peer, call, ticket)
        if known is not None:
            return known
        error = self._may_not(peer)
        if error is not None:
            return [Refuse(ticket, error)]
        # One that was out of touch may have been given a newer view than the others were told, since an agent has left, say. What
        # they agree on they name by the view's version, which is to be the same for all.
        ahead = version is not None and self._told < version <= self._version
        told = self._tell_view(f"{peer} knows it, and calls the agreement {name!r}") if ahead else []
        agreed = self._meetings.agree(
            peer, name, value, members, ticket, now, version=version, newest=self._told, call=call, processes=processes
        )
        return [*told, *agreed]

    def handle_barrier(
        self, peer: PeerId, name: str, members: Sequence[PeerId] | None, ticket: Ticket, now: float, call: int | None = None
    ) -> list[Action]:
        """A member has reached a barrier; without ``members`` it is a barrier of all workers. ``call``: as in `handle_agree`."""
        known = self._barriers.answered(name, peer, call, ticket)
        if known is not None:
            return known
        error = self._may_not(peer)
        if error is not None:
            return [Refuse(ticket, error)]
        version, elastic = self._version, self._elastic
        return self._meetings.reach(peer, name, members, ticket, now, version=version, elastic=elastic, call=call)

    def handle_needs_all(self, peer: PeerId, reason: str) -> list[Action]:
        """A worker says that this run cannot continue without any of them, although its topology allows it."""
        if not self._elastic or self._may_not(peer) is not None:
            return []
        self._elastic = False
        return [Note("not elastic", {"peer": peer}, reason)]

    @property
    def heartbeat_s(self) -> float:
        """When an agent is to send its next heartbeat, in seconds: later where there are many hosts, but two before a coordinator
        that does not answer counts as lost."""
        usual = self._timeouts.heartbeat_s
        return min(max(usual, len(self._members.agents) / MOST_HEARTBEATS), max(usual, self._timeouts.lost_s / 2))

    def handle_shown(self, heard_at: Callable[[PeerId], float | None], now: float) -> None:
        """Between heartbeats agents only show that they are there. ``heard_at``: when the newest message of an agent arrived."""
        self._heard.ask(now, lambda host: heard_at(self._members.agents[host].member.peer))

    def handle_heartbeat(self, peer: PeerId, alive: Iterable[PeerId], now: float) -> list[Action]:
        """A heartbeat of an agent: its host is alive, and so are these roles."""
        entry = self._members.get(peer)
        if entry is None or entry.member.kind != "agent" or not entry.here:
            return []
        self._heard.note(entry.member.host, now)
        living = set(alive)
        actions: list[Action] = []
        for other in self._members.roles_of(entry.member.host):
            # The first heartbeat since a role has joined may be older than the role: on its way, the join overtook it. The agent
            # sends the next one only after the answer to this one, and so after the join.
            was_unseen, other.unseen = other.unseen, other.here and not other.exited and other.member.peer not in living
            if was_unseen and other.unseen:
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
        again: bool = False,
    ) -> list[Action]:
        """An agent reports that a role's process has ended, and its number. ``stopped``: the agent ended it on purpose. ``again``:
        it starts another one in its place."""
        entry, judge = self._members.get(peer), self._members.get(agent)
        if entry is None or judge is None or judge.member.kind != "agent" or judge.member.host != entry.member.host:
            return []
        if entry.exited:  # another process in its place, which has not joined
            entry.returns = again
            return self._maybe_give_up(now)
        self._heard.note(judge.member.host, now)
        entry.exited, entry.returns = True, again
        left = entry.presence is Presence.LEFT
        never_joined = entry.presence is Presence.EXPECTED and not self._joining
        values: dict[str, Any] = {"peer": peer, "host": entry.member.host, "exit_code": exit_code}
        actions: list[Action] = [Note("exit", values, f"{peer} exited with code {exit_code}")]
        if exit_code == 0 and report is None and (left or never_joined):
            # A script that never joins is not a failure as long as no member waits for it.
            if not left:
                actions += self._remove(entry, Presence.LEFT, "it ended without joining")
            return actions + self._maybe_finish(now)
        if self._run.has_reported(peer):
            return actions + self._maybe_end()  # it has reported its failure itself
        failure = Failure.of_exit(peer, entry.member.host, exit_code, report, stopped=stopped, left=left, pid=pid)
        ended_by_agent = stopped and report is None  # its exit is not the reason why the run failed before
        if not ended_by_agent and self._run.explain(failure):
            return actions + self._maybe_end()
        if self._elastic and entry.presence is Presence.LOST and not failure.of_user:
            self._run.explain_last_worker(failure)
            return actions + self._maybe_give_up(now) + self._maybe_end()  # the run already continues without it
        had_done_its_part = left and self._elastic and not failure.of_user
        if entry.presence is not Presence.LOST and not had_done_its_part:
            actions += self._remove(entry, Presence.LOST, failure.reason)
        return actions + self._fail_or_go_on(entry, failure, now)

    def handle_failed(self, peer: PeerId, report: Mapping[str, Any], now: float) -> list[Action]:
        """A role reports its own failure, before others see that its connections end; or an agent reports that of its host."""
        entry = self._members.get(peer)
        if entry is None or not entry.here:
            return []
        code = report.get("exit_code")
        exit_code = code if isinstance(code, int) else 1
        failure = Failure.of_exit(peer, entry.member.host, exit_code, report, stopped=False, left=False)
        gone = self._remove_all_of(entry, failure.reason)
        # Its process still exists, and waits for the answer to this very call: so waits for it are not given up here.
        return [*(action for action in gone if not isinstance(action, Drop)), *self._fail_or_go_on(entry, failure, now)]

    def has_left(self, peer: PeerId) -> bool:
        """Whether a member has left the run, its work being done."""
        entry = self._members.get(peer)
        return entry is not None and entry.presence is Presence.LEFT

    def handle_leave(self, peer: PeerId, now: float, *, late: bool = False) -> list[Action]:
        """A member has done its work and leaves. The others are not told, since its messages may still be on the way to them.
        ``late``: it leaves because the others had trained all there was when it came. That says nothing of what they do now."""
        entry = self._members.get(peer)
        if entry is None or not entry.here:
            return []
        waited = [other for other in self._members.roles_of(entry.member.host) if other.here]
        if entry.member.kind == "agent" and waited and self.state is not State.ENDED:
            reason = f"the agent of {entry.member.host} left before its roles"
            return self._lose(entry, reason, HostLostError(reason), now)
        if late and self._elastic and entry.member.kind == "worker":
            reason = f"{peer} has left: {CAME_TOO_LATE}"
            actions = [*self._remove(entry, Presence.LEFT, CAME_TOO_LATE), Note("leave", {"peer": peer}, reason)]
            if self._some_left():
                return [*actions, *self._tell_view(reason), *self._maybe_finish(now)]
            error = PeerLostError(peer, reason)
            failure = Failure(peer, entry.member.host, None, reason, None, consequence=False, error=error)
            return actions + self._fail_or_go_on(entry, failure, now)
        actions = self._remove(entry, Presence.LEFT, DONE)
        if entry.member.kind == "observer":
            self._members.remove(peer)
        actions.append(Note("leave", {"peer": peer}, f"{peer} left"))
        if entry.member.kind == "worker" and self._elastic and not self._trained:
            # Before the first of them leaves, all who have a part in the training have come to its end. Others have come so late
            # that they may wait for what these do not give any more.
            self._trained = True
            reason = f"{peer} has left, since all was trained"
            told = [
                other.member.peer
                for other in self._members.of_kind("worker")
                if other.here and (other.member.peer in self._late or not other.member.ready)
            ]
            actions += [Push(other, "finish", None, reason) for other in told]
        return actions + self._maybe_finish(now)

    def handle_halt(self, peer: PeerId, reason: Mapping[str, Any], now: float) -> list[Action]:
        """A role asks to stop the run. All members are told once, and leave by themselves."""
        if self.halt_reason is not None or self.state in (State.FAILED, State.ENDED):
            return []
        if peer != "coordinator" and self._may_not(peer) is not None:
            return []
        told = f"{peer} stops the run: {reason.get('message', 'no reason given')}"
        values: dict[str, Any] = {"peer": peer, "reason": dict(reason)}
        actions: list[Action] = [Note("halt", values, told)]
        actions += self._joining.refuse_without(peer, told)
        return [*actions, *self._tell_all("halt", self._run.halt(peer, reason), told)]

    def handle_lost(self, peer: PeerId, reason: str, now: float) -> list[Action]:
        """The endpoint has lost its link to a peer. For a role with an agent, the report of its end is usually on the way; if none
        comes, the process stands still, and is lost all the same. If the others can continue without it, it is not waited for."""
        entry = self._members.get(peer)
        if entry is None or not entry.here or self.state is State.ENDED:
            return []
        if entry.member.kind == "observer":
            self._members.remove(peer)
            return []
        if entry.member.kind == "agent" and self._patient and self._complete:
            return []  # it may find its way back, and its heartbeats tell whether it does
        if entry.member.kind == "agent":
            why = self._heard.why_gone(entry.member.host, reason, now)
            return self._lose(entry, why, HostLostError(f"lost the host {entry.member.host}: {why}"), now)
        vouched_for = self._members.is_watched(entry)
        if vouched_for and (self._patient or not (self._elastic and self.state is State.RUNNING and self._shards.spared(entry))):
            if entry.member.is_role and self.state is State.RUNNING and entry.cut is None:
                entry.cut = (now, reason)  # `tick` comes back to it: agents make it come often
            return []
        if self.state is State.JOINING:  # it may come back as another process; if not, the join time-out names it
            entry.presence, self._version = Presence.EXPECTED, self._version + 1
            return self._joining.discard(peer, reason)
        return self._lose(entry, reason, HostLostError(f"lost {peer} on {entry.member.host}: {reason}"), now)

    def handle_rift(self, peer: PeerId, other: PeerId, process: int, reason: str, now: float) -> list[Action]:
        """A role says that its link to ``process`` of another one is lost, although that is a member still. Where the run can go
        on without one of them, it is decided a moment later which one goes."""
        one = self._members.get(peer)
        if one is not None and self._elastic and self.state is State.RUNNING:
            self._rifts.note((peer, one.incarnation), (other, process), reason[:LONGEST_TEXT], now)
        return []

    def handle_host_ended(self, host: str, reason: str, now: float) -> list[Action]:
        """The engine reports that a host's agent has ended. Ignored for an agent that has left."""
        entry = self._members.agents.get(host)
        if entry is None or entry.gone or self.state is State.ENDED:
            return []
        why = self._heard.why_gone(host, reason, now)
        return self._lose(entry, why, HostLostError(f"lost the host {host}: {why}"), now)

    # Time ---------------------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest; ``None`` once the run has ended."""
        if self.state is State.ENDED:
            return None
        deadlines = [*self._barriers.deadlines(), *self._heard.deadlines(), *self._rifts.deadlines(), *self._run.deadlines()]
        if self.state is State.JOINING:
            deadlines.append(self._join_deadline)
        return min(deadlines, default=None)

    def tick(self, now: float) -> list[Action]:
        """Apply the time-outs that are over at ``now``: silent hosts, late members, open barriers, the end. Returns what
        follows."""
        self._heard.look(now)
        actions: list[Action] = []
        for host in self._heard.silent(now):
            if self.state is not State.ENDED:
                reason = f"its agent has been silent for {self._timeouts.silent_s:g} s"
                actions += self._lose(self._members.agents[host], reason, HostLostError(f"lost the host {host}: {reason}"), now)
        actions += self._lose_still(now)
        actions += self._end_rifts(now)
        actions += self._barriers.tick(now)
        if self.state is State.JOINING and now >= self._join_deadline:
            actions += self._join_timed_out(now)
        actions += self._maybe_give_up(now)
        if self._run.is_late(now):
            actions += self._time_is_up(now)
        return actions

    def _lose_still(self, now: float) -> list[Action]:
        """Roles whose links were lost, and whose processes have not ended since: they answer nothing any more."""
        actions: list[Action] = []
        for entry in self._members:
            if self.state is State.RUNNING and entry.here and entry.cut and now >= entry.cut[0] + self._timeouts.flush_s:
                reason = (
                    f"it stands still: its process has not ended, but answers nothing (stopped, or swapped out?); {entry.cut[1]}"
                )
                error = HostLostError(f"{entry.member.peer} on {entry.member.host}: {reason}")
                actions += self._lose(entry, reason, error, now)
        return actions

    def _end_rifts(self, now: float) -> list[Action]:
        """Roles that cannot reach others any more, although their processes have not ended: workers, and servers whose shards
        others have."""

        def here(life: Life) -> bool:
            entry = self._members.get(life[0])
            return entry is not None and entry.member.is_role and entry.here and entry.incarnation == life[1]

        def may_go(one: Life, other: Life) -> bool:
            """No worker goes because of a server that must stay: that may be lost to all of them."""
            entry, stays = self._members.get(one[0]), self._members.get(other[0])
            if entry is None or stays is None or not self._shards.spared(entry):
                return False
            return entry.member.kind != "worker" or self._shards.spared(stays)

        def last(peer: PeerId) -> tuple[bool, bool, int]:
            entry = self._members.get(peer)
            assert entry is not None
            return entry.member.kind == "worker", not entry.member.ready, entry.member.index

        actions: list[Action] = []
        for gone in self._rifts.settle(now, here, last, may_go):
            entry = self._members.get(gone.peer)
            assert entry is not None
            # Once one server is lost, another one may be the last that has a shard.
            if self.state is State.RUNNING and entry.here and self._shards.spared(entry):
                error = HostLostError(f"{gone.peer} on {entry.member.host}: {gone.reason}")
                actions += self._lose(entry, gone.reason, error, now)
        return actions

    # What follows -------------------------------------------------------------------------------------------------------------

    def _may_not(self, peer: PeerId) -> ZmqTrainError | None:
        if self.state is State.ENDED:
            return PeerLostError("coordinator", f"the run has ended: {self._run.end_reason}")
        entry = self._members.get(peer)
        if entry is not None and entry.presence is Presence.LOST:  # given up before it could hear of that
            return given_up(peer, entry.reason or "another process has taken its place")
        if entry is None or not entry.here:
            return ProtocolError(f"{peer} is not a member of this run")
        if not self._complete:
            return ProtocolError(f"{peer} must wait until all members have joined")
        return None

    def _maybe_complete(self) -> list[Action]:
        if self.state is not State.JOINING or self._members.count_here() < len(self._members):
            return []
        self._complete = True
        self._version += 1
        self._told = self._version
        self._run.go(State.RUNNING)
        reason = f"all processes have joined: {self._members.here_in_words()}"
        value = self.view().to_value()
        answers = self._joining.answer_all(value, reason)
        # Agents did not wait; from now on they may be without a coordinator for a while.
        agents = [entry.member.peer for entry in self._members.agents.values()] if self._patient else []
        told = [Push(agent, "view", value, reason) for agent in agents]
        return [Note("running", {"members": len(self._members)}, reason), *answers, *told]

    def _remove(self, entry: Entry, presence: Presence, reason: str) -> list[Action]:
        """A member is gone, for any reason; if it is lost, so are those that cannot train without it. Members that wait for it are
        told."""
        actions = self._remove_one(entry, presence, reason)
        if presence is Presence.LOST and self._elastic and self.state in (State.RUNNING, State.FINISHING):
            for other in self._group_of(entry):
                if other.here:
                    peer, why = other.member.peer, f"its group cannot go on without {entry.member.peer}"
                    actions += self._remove_one(other, presence, why)
                    values = {"peer": peer, "host": other.member.host, "reason": why}
                    self._lost_with_it.append(Note("lost", values, f"lost {peer} on {other.member.host}: {why}"))
        return actions

    def _note_others(self) -> list[Note]:
        """Those that were lost because another one was, which has been noted."""
        noted, self._lost_with_it = self._lost_with_it, []
        return noted

    def _group_of(self, entry: Entry) -> list[Entry]:
        """A member, and all without whom it cannot train."""
        if not (self._whole_groups and entry.member.kind == "worker"):
            return [entry]
        return [other for other in self._members.of_kind("worker") if other.member.group == entry.member.group]

    def _remove_one(self, entry: Entry, presence: Presence, reason: str) -> list[Action]:
        if entry.here:
            self._version += 1
            self._changes += self._complete and entry.member.kind == "worker" and entry.member.ready
        entry.presence, entry.reason = presence, reason[:LONGEST_TEXT]
        peer = entry.member.peer
        if entry.member.kind == "agent":
            self._heard.forget(entry.member.host)
        actions = self._joining.refuse(peer, PeerLostError(peer, reason))
        if (ticket := self._ready.pop(peer, None)) is not None:
            actions.append(Refuse(ticket, PeerLostError(peer, reason)))
        actions += self._barriers.give_up(peer, reason)
        if not self._complete and entry.member.is_role:
            # All members still wait for a view that will never be complete.
            actions += self._joining.refuse_without(peer, reason)
        if presence is Presence.LOST:
            actions.append(Drop(peer, reason, entry.incarnation or None))
            alone = self._shards.without(peer)
            actions += alone if self.state in (State.RUNNING, State.FINISHING) else []
        return actions

    def _lose(self, entry: Entry, reason: str, error: ZmqTrainError, now: float) -> list[Action]:
        """A member is lost; if it is an agent, all roles of its host are lost, too."""
        actions = self._remove_all_of(entry, reason)
        actions.append(Note("lost", {"peer": entry.member.peer, "host": entry.member.host, "reason": reason}, str(error)))
        peer, host = entry.member.peer, entry.member.host
        failure = Failure(peer, host, None, str(error), None, consequence=False, error=error)
        return actions + self._fail_or_go_on(entry, failure, now)

    def _remove_all_of(self, entry: Entry, reason: str) -> list[Action]:
        """A member is lost, and with an agent all roles of its host."""
        actions = self._remove(entry, Presence.LOST, reason)
        if entry.member.kind == "agent":
            for other in self._members.roles_of(entry.member.host):
                other.exited = True  # as far as is known
                if not other.gone:
                    actions += self._remove(other, Presence.LOST, f"its host {entry.member.host} is lost: {reason}")
        return actions

    def _fail_or_go_on(self, entry: Entry, failure: Failure, now: float) -> list[Action]:
        """A member is gone for good. An elastic run continues without workers, as long as others are left and the worker's own
        code did not fail; and without model servers, as long as others have their shards."""
        roles = self._members.roles_of(entry.member.host) if entry.member.kind == "agent" else [entry]
        survivable = self._elastic and self.state in (State.RUNNING, State.FINISHING) and not failure.of_user
        nothing_lost = not self._shards.lost
        spared = all(role.member.kind == "worker" or (nothing_lost and self._shards.chained(role.member.kind)) for role in roles)
        others = self._note_others()
        if not (survivable and spared):
            return [*others, *self._fail(failure, now)]
        if not self._some_left():
            if not (self.state is State.RUNNING and self._comes_back()):
                return [*others, *self._fail(failure, now)]
            self._run.wait_for_a_worker(failure, now)
        self._run.losses += [failure.reason, *(each.reason for each in others)]
        values: dict[str, Any] = {"peer": failure.peer, "host": failure.host, "reason": failure.reason}
        noted = [] if failure.exit_code is None else [Note("lost", values, failure.reason)]
        noted += others
        if self._run.last_worker is not None:
            wait_s = self._timeouts.join_s
            reason = f"no worker is left; waiting for up to {wait_s:g} s for one that is started again"
            noted.append(Note("no workers", {"wait_s": wait_s}, reason))
        return [*noted, *self._tell_view(failure.reason), *self._maybe_finish(now)]

    def _some_left(self) -> bool:
        """Whether a worker is there, or has trained all that there was for it. One that waits for others of its group has nothing
        of what was trained."""
        return any(
            (other.here and (other.member.ready or not self._whole_groups))
            or (other.presence is Presence.LEFT and other.reason != CAME_TOO_LATE)
            for other in self._members.of_kind("worker")
        )

    def _maybe_give_up(self, now: float) -> list[Action]:
        """If no worker is left, and none comes back any more, or none has come in time: the run has failed."""
        failure = self._run.last_worker
        if failure is None or self.state is not State.RUNNING:
            return []
        return [] if self._run.may_still_come(now) and self._comes_back() else self._fail(failure, now)

    def _comes_back(self) -> bool:
        """Whether a worker may come back, and all without whom it cannot train, and find what was trained."""
        kept = not any(server.presence is Presence.LEFT for server in self._members.of_kind("server"))
        if not (self._lasting and kept and self._whole_groups):
            return self._lasting and kept and self._members.some_return()
        workers = self._members.of_kind("worker")
        without = {each.member.group for each in workers if not (each.here or self._members.may_return(each))}
        return any(each.member.group not in without for each in workers)

    def _tell_view(self, reason: str, *, but: PeerId | None = None) -> list[Action]:
        """Send all members the current view, which replaces all earlier ones."""
        moves = self._shards.decide() if self.state is State.RUNNING else []
        self._told = self._version
        tell = [action for action in self._tell_all("view", self.view().to_value(), reason) if action.to != but]
        return [*moves, *self._barriers.outdate(self._version, reason), *tell]

    def _fail(self, failure: Failure, now: float) -> list[Action]:
        told = self._run.fail(failure, now)
        if told is None:
            # The remaining members need no new view, but a peer that is lost later must not be waited for either.
            return [*self._tell_all("view", self.view().to_value(), failure.reason), *self._maybe_end()]
        actions: list[Action] = [Note("failed", {"peer": failure.peer, "reason": failure.reason}, failure.reason)]
        actions += self._joining.refuse_without(failure.peer, failure.reason)
        # The view first: it ends waits for lost members, so that a role is free to receive the rest.
        actions += self._tell_all("view", self.view().to_value(), failure.reason)
        actions += self._tell_all("halt", told, failure.reason)
        return actions + self._maybe_end()

    def _tell_all(self, what: Any, value: Value, reason: str) -> list[Push]:
        return [Push(entry.member.peer, what, value, reason) for entry in self._members.here()]

    def _maybe_finish(self, now: float) -> list[Action]:
        actions: list[Action] = []
        over = self._run.last_worker is None and self._members.all_gone("worker")
        if self.state in (State.JOINING, State.RUNNING) and over:
            self._run.finish(now)
            reason = "all workers have left"
            actions.append(Note("finishing", {}, reason))
            servers = [entry.member.peer for entry in self._members.of_kind("server", "fc") if not entry.gone]
            actions += [Push(server, "finish", None, reason) for server in servers]
        return actions + self._maybe_end()

    def _maybe_end(self) -> list[Action]:
        if self.state not in (State.FINISHING, State.FAILED):
            return []
        if not all(map(self._members.ended, self._members.of_kind("worker", "server", "fc"))):
            return []
        return self._end()

    def _end(self) -> list[Action]:
        outcome = self._run.end()
        ended = PeerLostError("coordinator", f"the run has ended: {outcome.reason}")
        refusals: list[Action] = [Refuse(ticket, ended) for ticket in self._barriers.close()]
        refusals += self._joining.refuse_all(ended)
        agents: list[Action] = [
            Push(agent.member.peer, "finish", None, outcome.reason) for agent in self._members.agents.values() if agent.here
        ]
        return [*refusals, *agents, Note("ended", {"status": outcome.status}, outcome.reason), End(outcome, outcome.reason)]

    def _join_timed_out(self, now: float) -> list[Action]:
        missing = [entry for entry in self._members if entry.presence is Presence.EXPECTED]
        named = name_some([entry.member.peer for entry in missing])
        error = PeerTimeoutError(
            named, f"all members to join ({len(missing)} of {len(self._members)} are missing)", self._timeouts.join_s
        )
        actions = self._joining.refuse_all(error)
        failure = Failure(missing[0].member.peer, missing[0].member.host, None, str(error), None, consequence=False, error=error)
        return actions + self._fail(failure, now)

    def _time_is_up(self, now: float) -> list[Action]:
        """The time for ending is over, but members are left."""
        if self.state is State.FAILED:
            return self._end()
        still = [entry for entry in self._members if entry.member.is_role and not entry.gone]
        if not still:  # all have left; only their processes are slow to end, which their agents handle
            return self._end()
        peers = name_some([entry.member.peer for entry in still])
        error = PeerTimeoutError(peers, "the end of the run", self._timeouts.request_s)
        return self._fail(Failure(still[0].member.peer, still[0].member.host, None, str(error), None, False, error), now)
