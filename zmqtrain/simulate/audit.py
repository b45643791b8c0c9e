"""Properties that must hold in every run, whatever goes wrong: checked against what roles state and report.

- No gradient is applied twice, and each update makes one new version.
- Groups keep within the staleness that the file allows.
- A run that ends well has trained each step of each worker once, on all its samples, and its replicas are equal.
- If workers of model servers may be lost: what `zmqtrain.simulate.slot_audit` lists.
- If groups of several workers train in step, and may lose some: gradients are of the very parameters that they change, and as
  long as somebody of each group has always been there, each update is over the batches of all groups.
- A group reads parameters in which its own gradient counts; an FC server applies each group's step once.
- Exchanges without servers are over the same members for all workers, and their models are what a replay of these gives.
- A run whose faults can be survived ends well. Any other run ends with an error, and none hangs beyond the time-outs.
- If it is known how long the run takes without faults, it ends soon after the last of them is over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from zmqtrain.data.division import Span
from zmqtrain.exchange.pieces import Piece
from zmqtrain.membership.chains import Chains
from zmqtrain.merged_fc.profile_phases import worker_profile
from zmqtrain.net.endpoint import PeerId
from zmqtrain.run.ending import Ending
from zmqtrain.run.faults import RESTART_S, Fault
from zmqtrain.simulate.grid_audit import GridAudit
from zmqtrain.simulate.replay import Ledger
from zmqtrain.simulate.slot_audit import SlotAudit
from zmqtrain.topology.placement import Placement, heads_of
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.memory import wrong_pieces
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload

if TYPE_CHECKING:
    from zmqtrain.train.work import ModelState

#: Whether the run's model of a step is the one that it should be: if not, how it differs.
Compare: TypeAlias = "Callable[[int, ModelState], str | None]"
#: Further findings would tell nothing new.
MOST = 20
#: With its faults over, a run may take so many times as long as a whole run without faults: a few workers may be left, which train
#: what the others have left.
SLOWER = 20.0


class Auditor:
    """Gets all facts and reports, and gives its `verdict` at the end."""

    def __init__(
        self,
        topology: Topology,
        placement: Placement,
        clock: Callable[[], float],
        *,
        usual_s: float | None = None,
        compare: Compare | None = None,
    ) -> None:
        """``usual_s``: how long the run takes without faults. ``compare``: tells whether the run's model is right."""
        self._usual_s, self._compare_model = usual_s, compare
        self._model: tuple[int, ModelState] | None = None  # the run's model of the newest step
        self._after: dict[tuple[int, int, int], int] = {}  # piece, group, step -> the version with its gradient
        self._merged: Counter[tuple[PeerId, int, int]] = Counter()  # FC server, group, step
        self._topology, self._placement, self._clock = topology, placement, clock
        self._timeouts = topology.job.timeouts
        self._broken: list[str] = []
        self._applied: set[tuple[PeerId, int, int, int]] = set()  # server, piece, group, step
        self._versions: dict[tuple[PeerId, int], int] = {}
        self._pushed: dict[tuple[PeerId, int], list[int]] = {}  # the number of steps of each group in each piece of a server
        self._gone: set[tuple[PeerId, int]] = set()  # server, group: the server no longer waits for the group
        self._resting: set[tuple[PeerId, int]] = set()  # those of them that may push again
        self._entered: dict[tuple[PeerId, int], int] = {}  # the first step of a group that came late
        self._entries: set[tuple[PeerId, int, int]] = set()  # all of these: a push may count after its group was lost and is back
        self._steps: Counter[tuple[PeerId, int]] = Counter()
        self._samples: Counter[int] = Counter()
        self._lost: dict[PeerId, None] = {}  # workers without which an elastic run continued, at least for a while
        self._spread: float | None = None
        self._wrong_values: str | None = None
        self._held: dict[PeerId, Mapping[int, tuple[Piece, Payload]]] = {}  # what each server holds when it ends
        self._backups: dict[PeerId, Mapping[int, tuple[Piece, Payload]]] = {}  # what each copy of a shard holds that does not serve
        self._chains = Chains(heads_of(topology, placement))
        self._ledger = Ledger(topology, placement)
        self._ran = False  # all had joined
        self._trains: set[PeerId] = set()  # workers that have begun a step
        self._died_early = False  # a launcher before all workers trained, or a worker without which servers cannot begin
        self._last_s = 0.0
        self._first = 0
        exchange = topology.exchange
        in_step = exchange.kind == "model_server" and exchange.policy == "sync" and topology.compute.group_size > 1
        self._repeats = topology.elastic and in_step and not topology.whole_groups
        """Whether groups of several workers train in step, and train a step again that they have given up."""
        self._lacking: str | None = None  # an update without the batch of a group
        self._slots = SlotAudit(topology, placement) if topology.elastic and topology.exchange.kind == "model_server" else None
        self._grids = GridAudit() if topology.forms_grids else None
        self.stopped_at: int | None = None
        """The step before which all workers stopped because they were asked to."""

    def goes_on_at(self, step: int) -> None:
        """The run resumes a checkpoint of this step."""
        self._first = step

    def note(self, text: str) -> None:
        """Add a finding made elsewhere."""
        if len(self._broken) < MOST:
            self._broken.append(text)

    # What the auditor is told.

    def hear(self, peer: PeerId, what: str, values: Mapping[str, object]) -> None:
        """A role states a fact."""
        if "shard" in values:  # of one copy of a shard
            if what == "copied":
                self._hear_copied(f"{peer}/{values['shard']}", f"{values['to']}/{values['shard']}")
            peer = f"{peer}/{values['shard']}"
        if self._slots is not None:
            self._slots.hear(peer, what, values)
        if what == "applied":
            self._hear_applied(peer, cast(Mapping[str, Any], values))
        elif what == "read":
            self._hear_read(
                peer, int(cast(int, values["piece"])), int(cast(int, values["step"])), int(cast(int, values["version"]))
            )
        elif what == "fc applied":
            for group, step in cast(Sequence[tuple[int, int]], values["reads"]):
                self._merged[peer, group, step] += 1
                if step and not self._first and self._slots is None and not self._merged[peer, group, step - 1]:
                    self.note(f"{peer} applied step {step} of group {group} before step {step - 1}")
        elif what == "grid" and self._grids is not None:
            number, rows = int(cast(int, values["number"])), int(cast(int, values["rows"]))
            self._grids.begins(number, rows, cast(Sequence[str], values["workers"]))
        elif what == "begin_step":
            self._trains.add(peer)
            self._ledger.began(peer, int(cast(int, values["step"])))
        elif what == "mixed":
            self._ledger.mixed(
                peer, int(cast(int, values["step"])), int(cast(int, values["bucket"])), cast(Sequence[str], values["sources"])
            )
        elif what == "joined":
            self._ledger.joined(peer, int(cast(int, values["step"])), str(values["source"]))
        elif what == "divides":
            self._ledger.takes(peer, int(cast(int, values["step"])), cast(Sequence[Span], values["spans"]))
        elif what == "combines":
            bucket, own = int(cast(int, values["bucket"])), cast(Payload, values["own"])
            self._ledger.combines(peer, int(cast(int, values["step"])), bucket, own)
        elif what == "summed":
            self._ledger.summed(peer, int(cast(int, values["step"])), cast(Sequence[str], values["members"]))
        elif what == "takes":
            self._ledger.takes_turn(peer, int(cast(int, values["step"])), int(cast(int, values["slot"])))
        elif what == "all trained":
            self._ledger.all_trained()
        elif what == "counted":
            self._ledger.counted(peer, int(cast(int, values["step"])), cast(Sequence[str], values["members"]))
        elif what == "model":
            self._ledger.ended(peer, cast(Any, values["values"]), cast(Sequence[str], values["members"]))
        elif what == "run model" and self._compare_model is not None:
            self._model = (
                int(cast(int, values["step"])),
                {name: tensor.clone() for name, tensor in cast("ModelState", values["state"]).items()},
            )
        elif what in ("left", "dropped", "rests"):
            gone = peer, int(cast(int, values["group"]))
            self._gone.add(gone)
            if what == "rests":
                self._resting.add(gone)
            else:  # what it has pushed before still counts, and does not bring it back
                self._resting.discard(gone)
        elif what == "entered":
            self._hear_entered(peer, int(cast(int, values["group"])), int(cast(int, values["step"])))
        elif what == "values":
            differs = values.get("wrong")
            if differs is not None:
                self._wrong_values = f"{peer}: {differs}"
        elif what == "backup":
            self._backups[peer] = cast(Mapping[int, tuple[Piece, Payload]], values["pieces"])
        elif what == "held":
            self._held[peer] = cast(Mapping[int, tuple[Piece, Payload]], values["pieces"])

    def _hear_copied(self, copy: str, other: str) -> None:
        """Another copy of a shard begins with the state that this one has now."""
        of_groups: list[dict[tuple[PeerId, int], Any]] = [self._versions, self._pushed, self._entered]
        for facts in of_groups:
            for key in [key for key in facts if key[0] == other]:
                del facts[key]
            facts |= {(other, key[1]): deepcopy(value) for key, value in facts.items() if key[0] == copy}
        for marked in (self._gone, self._resting):
            marked -= {key for key in marked if key[0] == other}
            marked |= {(other, group) for server, group in marked if server == copy}
        for turn in [turn for turn in self._merged if turn[0] == other]:
            del self._merged[turn]
        self._merged.update({(other, *turn[1:]): times for turn, times in self._merged.items() if turn[0] == copy})
        self._applied -= {key for key in self._applied if key[0] == other}
        self._applied |= {(other, *key[1:]) for key in self._applied if key[0] == copy}
        self._entries -= {key for key in self._entries if key[0] == other}
        self._entries |= {(other, *key[1:]) for key in self._entries if key[0] == copy}

    def _hear_entered(self, server: PeerId, group: int, step: int) -> None:
        """A group trains from ``step`` on, unless it was there before."""
        if (server, group) in self._gone:
            self._resting.add((server, group))
            self._entered[server, group] = step
            self._entries.add((server, group, step))

    def _begins(self, server: PeerId, group: int) -> int:
        """The step with which the group begins, for a piece of which nothing has been pushed yet."""
        late = None if (server, group) in self._gone else self._entered.get((server, group))
        return self._first if late is None else max(self._first, late)

    def _hear_read(self, peer: PeerId, piece: int, step: int, version: int) -> None:
        """A worker has the answer to its push of the step before."""
        group = self._placement.role(peer).group
        where = piece, group, step - 1
        after = self._after.get(where) if self._repeats else self._after.pop(where, None)
        if after is None:
            self.note(f"{peer} was answered before step {step - 1} counts in piece {piece}")
        elif version < after:
            self.note(f"{peer} read version {version} of piece {piece}, but its step {step - 1} counts only in version {after}")

    def _hear_applied(self, server: PeerId, values: Mapping[str, Any]) -> None:
        piece, version = int(values["piece"]), int(values["version"])
        goes_on = self._first or self._topology.job.optimizer_state == "kept"  # servers go on counting
        known = self._versions.get((server, piece), version - 1 if goes_on else 0)
        if version != known + 1:
            self.note(f"{server} went from version {known} of piece {piece} to version {version}")
        self._versions[server, piece] = version
        counts = self._pushed.setdefault((server, piece), [self._begins(server, group) for group in range(self._placement.groups)])
        for group, step, _read in values["reads"]:
            key = (server, piece, int(group), int(step))
            self._after[piece, int(group), int(step)] = version
            if key in self._applied:
                self.note(f"{server} applied step {step} of group {group} to piece {piece} twice")
            self._applied.add(key)
            since = max(counts[group], self._entered.get((server, int(group)), 0))  # what it took before it was lost is others'
            if (server, int(group), int(step)) in self._entries or self._had_no_part(int(group), since, int(step)):
                counts[group] = step
            if step != counts[group]:
                self.note(f"{server} applied step {step} of group {group} to piece {piece} after only {counts[group]} of its steps")
            counts[group] += 1
            if (server, group) in self._resting and step >= self._entered.get((server, group), 0):
                self._resting.discard((server, group))
                self._gone.discard((server, group))
                for (other, _), others in self._pushed.items():  # its other pieces follow
                    if other == server:
                        others[group] = max(others[group], self._entered.get((server, group), 0))
        self._check_staleness(server, piece, counts, values)
        if self._repeats:
            self._check_whole(server, piece, version, values)

    def _check_whole(self, server: PeerId, piece: int, version: int, values: Mapping[str, Any]) -> None:
        there = {int(group) for group, *_ in values["reads"]} - set(values["skipped"])
        lack = sorted(set(range(self._placement.groups)) - there)
        if lack and self._lacking is None:
            self._lacking = f"{server} made version {version} of piece {piece} without the batches of groups {lack}"
        for group, step, read in values["reads"]:
            if read != version - 1:
                self.note(f"{server} made version {version} of piece {piece} with step {step} of group {group}, of version {read}")

    def _had_no_part(self, group: int, first: int, until: int) -> bool:
        """Whether the group took no batch in the steps from ``first`` up to ``until``, of which there is at least one."""
        slots = self._slots
        return slots is not None and first < until and not any(slots.took(group, step) for step in range(first, until))

    def _check_staleness(self, server: PeerId, piece: int, counts: Sequence[int], values: Mapping[str, Any]) -> None:
        exchange = self._topology.exchange
        counts = [count for group, count in enumerate(counts) if (server, group) not in self._gone]
        if exchange.policy == "sync":
            if len(set(counts)) > 1:
                self.note(f"{server} has applied piece {piece} for some groups only: {counts} steps, in synchronous training")
        # A group may be ahead of the slowest by the bound, plus the step that it was allowed to begin.
        elif exchange.policy == "bound" and (ahead := max(counts, default=0) - min(counts, default=0)) > (exchange.bound or 0) + 1:
            self.note(f"{server} let a group be {ahead} steps ahead in piece {piece}; the bound is {exchange.bound}")

    def membership_event(self, kind: str, values: Mapping[str, Any]) -> None:
        """The coordinator records an event."""
        self._last_s = max(self._last_s, self._clock())
        peer = str(values.get("peer", ""))
        self._ran = self._ran or kind == "running"
        if self._grids is not None:
            self._follow_grids(kind, peer)
        if kind == "lost":
            of_host = peer.startswith("agent/")
            gone = [role.peer for role in self._placement.of_host(peer.removeprefix("agent/"))] if of_host else [peer]
            self._lost.update(dict.fromkeys(gone))
            self._ledger.lost(gone)
        if kind == "lost" and self._slots is not None and not self._trains:
            # The first group gives the servers their first values. Until they have these, none of it can be replaced.
            self._died_early = self._died_early or not self._lost.keys().isdisjoint(self._placement.group_members(0))
        if kind in ("lost", "failed"):
            for each in (peer, *(role.peer for role in self._placement.of_host(peer.removeprefix("agent/")))):
                self._chains.remove(each)
        elif kind == "backup" and values["backup"] is not None:
            self._chains.add(int(values["shard"]), str(values["server"]), str(values["backup"]))
        elif kind == "backup":  # without one, which is lost or leaves
            shard, server = int(values["shard"]), str(values["server"])
            for other in self._chains.value[shard][1:]:
                self._chains.do_without(shard, server, other)
        elif kind == "moved":
            self._chains.hand_over(
                int(values["shard"]), str(values["before"]), str(values["server"]), copies=self._topology.replicated
            )

    def _follow_grids(self, kind: str, peer: PeerId) -> None:
        assert self._grids is not None
        if kind in ("lost", "failed"):
            self._grids.lost([peer, *(role.peer for role in self._placement.of_host(peer.removeprefix("agent/")))])
        elif kind == "join":
            self._grids.joined(peer)
        elif kind == "not elastic" and not self._grids.may_give_up:
            self.note("the run gave up, although a worker of each row of its grid was there")

    def launcher_died(self) -> None:
        """A launcher has died. Another one goes on only with what all know: that all have joined."""
        if any(worker.peer not in self._lost and worker.peer not in self._trains for worker in self._placement.workers):
            self._died_early = True

    def report(self, peer: PeerId, events: Sequence[Mapping[str, Any]]) -> None:
        """Take in events that a role has reported."""
        for event in events:
            values = event.get("values") or {}
            self._last_s = max(self._last_s, float(event.get("time") or 0.0))
            if event.get("kind") == "step":
                step = int(event["step"])
                self._steps[peer, step] += 1
                self._samples[step] += int(values["samples"])
            elif event.get("kind") == "start" and self._slots is not None and not event.get("step"):
                job, due = self._topology.job, values.get("due")
                first = peer not in self._lost  # for one that comes late what is left is due
                if first and job.steps is None and job.until is None and isinstance(due, int):
                    self._slots.total = due // self._topology.compute.batch_size
            elif event.get("kind") == "stopped":
                self.stopped_at = int(event["step"])
            elif event.get("kind") == "finish":
                self._spread = max(self._spread or 0.0, float(values.get("replica_spread") or 0.0))

    # The verdict.

    def verdict(self, ending: Ending, seconds: float, faults: Sequence[Fault]) -> list[str]:
        """All violations, in words. ``faults``: what was injected."""
        error = ending.error or {}
        # The loss of the last worker that trains ends the run. It is the run's error, and no event says that others go on.
        lost = {*self._lost, error.get("peer") if error.get("type") == "HostLostError" else None}
        anybody = any(worker.peer not in lost for worker in self._placement.workers)
        # Until all have joined, the run needs all of them.
        elastic = self._topology.elastic and anybody and self._ran
        fatal = [
            fault for fault in faults if not fault.survivable(self._timeouts, elastic=elastic and not self._hits_server(fault))
        ]
        preempted = ending.status == "preempted" or (ending.error or {}).get("kind") == "preempted"
        if ending.status == "done" or (preempted and self.stopped_at is not None):
            self._check_done(corrupted=any(fault.kind == "corrupt" for fault in faults))
        elif not (fatal or self._died_early or self._without_a_row or preempted or self._own_fault(error)):
            what = f"{error.get('type')}: {error.get('message')}"
            self.note(f"the run ended with status {ending.status} ({what}), although all its faults can be survived")
        self._check_end(seconds, faults)
        return list(self._broken)

    @property
    def _without_a_row(self) -> bool:
        """Whether a part of the model was lost, without which no grid can go on."""
        return self._grids is not None and self._grids.a_row_is_gone

    def _hits_server(self, fault: Fault) -> bool:
        """Whether a server may be lost, without which the run does not go on."""
        if self._chains and not self._chains.lost:
            return False
        servers = (*self._placement.every_server, *self._placement.fc_roles)
        hit = {fault.target, *(host for side in fault.sides for host in side)}
        return any(server.peer in hit or server.host in hit for server in servers)

    def _check_done(self, *, corrupted: bool) -> None:
        job, compute = self._topology.job, self._topology.compute
        again = [f"step {step} of {peer}" for (peer, step), times in self._steps.items() if times > 1 and peer not in self._lost]
        if again:
            self.note(f"trained more than once: {', '.join(sorted(again)[:5])}")
        until = job.steps if self.stopped_at is None else self.stopped_at
        if until is not None:
            stayed = {worker.peer for worker in self._placement.workers if worker.peer not in self._lost}
            if self._topology.elastic and (self._slots is not None or self._topology.compute.group_size > 1):
                # A team that has lost one gives up its step, and begins again where all know.
                hit = {self._placement.role(peer).group for peer in self._lost if peer.startswith("worker/")}
                stayed = {peer for peer in stayed if self._placement.role(peer).group not in hit}
            missing = max(0, until - self._first) * len(stayed)
            missing -= sum(peer in stayed and step < until for peer, step in self._steps)
            if missing:
                self.note(f"{missing} steps of workers are missing")
        if self._compare_model is not None and not corrupted:
            self._check_model(self._compare_model, until)
        groups = map(self._placement.group_members, range(self._placement.groups))
        if self._lacking is not None and not any(self._lost.keys() >= set(members) for members in groups):
            self.note(f"{self._lacking}, although somebody of each group has always been there")
        if self._slots is not None and not corrupted and not self._first:
            if self.stopped_at is not None:
                self._slots.total = None
            holds = compute.profile is not None and self._topology.simulation.payload == "small"
            profile = worker_profile(self._topology) if holds else None
            for backup, pieces in self._backups.items():
                self._compare(backup, pieces)
            for found in self._slots.verdict(profile):
                self.note(found)
        if not corrupted and self._topology.simulation.payload == "small" and not self._first:
            for found in self._ledger.wrong(self._lost, whole=self.stopped_at is None):
                self.note(found)
        twice = [f"step {step} of group {group}" for (_, group, step), times in self._merged.items() if times > 1]
        if twice:
            self.note(f"an FC server applied {', '.join(twice[:5])} more than once")
        if self._lost:
            return  # the remaining properties hold only if no worker was lost
        if until is not None:
            usual = compute.batch_size * self._placement.groups
            there = Counter(step for peer, step in self._steps if peer.startswith("worker/"))
            for step in range(self._first, until):
                more = self._topology.job.on_resize != "keep"  # those who have joined train as much as the others
                expected = round(usual * there[step] / compute.workers) if more else usual
                if self._samples[step] != expected:
                    self.note(f"step {step} was trained on {self._samples[step]} samples, not {expected}")
                    break
        if corrupted:
            return  # no role notices a flipped bit of a tensor: TCP's checksum would
        if self._wrong_values is not None:
            self.note(self._wrong_values)
        if job.steps is not None and compute.profile is not None:
            for server, pieces in self._held.items() if self._topology.simulation.payload == "small" else ():
                wrong = wrong_pieces(worker_profile(self._topology), self._topology, job.steps, pieces)
                if wrong is not None:
                    self.note(f"{server}: {wrong}")
        if self._equal_at_end and self._spread:
            self.note(f"replicas differ by up to {self._spread:g} at the end of synchronous training")

    def _check_model(self, compare: Compare, until: int | None) -> None:
        if self._model is None or (until is not None and self._model[0] != until):
            if self.stopped_at is not None:
                return  # before anybody could keep it
            at = "none" if self._model is None else f"one of step {self._model[0]}"
            self.note(f"the run has left {at} as its model, not that of step {until}")
        elif (differs := compare(*self._model)) is not None:
            self.note(differs)

    def _compare(self, backup: str, pieces: Mapping[int, tuple[Piece, Payload]]) -> None:
        """At the end a shard's copies are equal."""
        served = {index: held for each in self._held.values() for index, (_, held) in each.items()}
        for index, (_, payload) in pieces.items():
            if index in served and isinstance(payload, TensorPayload) and list(payload.frames()) != list(served[index].frames()):
                self.note(f"{backup} has another copy of piece {index} than its server")

    def _own_fault(self, error: Mapping[str, Any]) -> bool:
        """Whether the job itself is at fault: its file, or its task's code, if it has any. Once it trains, its file is no
        hindrance any more."""
        verdict = error.get("verdict")
        return (verdict == "topology" and not self._trains) or (verdict == "user code" and self._topology.job.task is not None)

    def _check_end(self, seconds: float, faults: Sequence[Fault]) -> None:
        """Whatever happens, some process gives up within the time-outs, and says so."""
        timeouts = self._timeouts
        last = max([self._last_s, *((fault.at or 0.0) + (fault.lasts or 0.0) for fault in faults)])
        patience = timeouts.barrier_s + timeouts.lost_s + timeouts.join_s + timeouts.grace_s
        if seconds - last > patience:
            self.note(
                f"the run hung: no role reported anything for {seconds - last:g} s before its end; time-outs add up to "
                f"{patience:g} s"
            )
        if self._usual_s is not None:
            over_s, slower = _over(faults, self._topology.network.latency or 0.0)
            work_s = SLOWER * slower * self._usual_s
            # What was lost is noticed, waited for and given up; and then the run goes on, or ends.
            notice_s = timeouts.silent_s + timeouts.lost_s + timeouts.request_s + 2 * timeouts.grace_s + RESTART_S
            if seconds > over_s + work_s + notice_s:
                self.note(
                    f"the run ended {seconds - over_s:g} s after its last fault was over; it takes {self._usual_s:g} s without "
                    f"faults, so at most {work_s + notice_s:g} s were to be expected"
                )

    @property
    def _equal_at_end(self) -> bool:
        exchange = self._topology.exchange
        return exchange.kind == "allreduce" or (exchange.kind == "model_server" and exchange.policy == "sync")


def _over(faults: Sequence[Fault], latency_s: float) -> tuple[float, float]:
    """When the last of these faults is over, and how many times slower than usual the slowest worker is from then on."""
    over_s, slower = 0.0, 1.0
    delays = [
        (fault.at or 0.0, (fault.at or 0.0) + (fault.lasts or 0.0), fault.factor) for fault in faults if fault.kind == "delay"
    ]
    for fault in faults:
        begins = fault.at or 0.0
        if fault.kind == "slow" and fault.lasts is None:
            slower *= max(1.0, fault.factor)
        over_s = max(over_s, begins + (fault.lasts or 0.0))
    for begins, ends, _ in delays:  # what is sent while several delay a peer arrives after all of them, times each other
        together = math.prod(factor for first, last, factor in delays if first <= ends and begins <= last)
        over_s = max(over_s, ends + together * latency_s)
    return over_s, slower
