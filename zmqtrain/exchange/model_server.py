"""The worker's side of model servers: gradients are sent to the servers bucket by bucket, and parameters come back.

The life of a bucket, while backward and the next forward run::

    bucket_ready -> reduce_scatter in the group -> push own pieces -> read own pieces for the next step -> all_gather in the group
                 -> replica.parameters_ready

Each worker of a group exchanges only its part of a bucket, so the servers' traffic is one model per group.

With members that survive losses, `zmqtrain.exchange.server_changes` tells servers who takes part from which step on; a worker that
comes late then gets the parameters for its first step from them, and what is beside these from another worker
(`zmqtrain.exchange.beside`). So do all workers of a group of several that has lost one, or got one (`zmqtrain.exchange.own_team`).
A group that divides its model comes and goes as a whole; each of its workers has to do with the pieces of its own row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.unreached import Cuts
from zmqtrain.data.teams import Team, owner_of
from zmqtrain.errors import CheckpointError, PeerLostError, ProtocolError, UsageError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.base import Bucket, OptimizerSpec, Replica, RunModel
from zmqtrain.exchange.beside import Beside
from zmqtrain.exchange.clip import GroupClip
from zmqtrain.exchange.context import ExchangeContext
from zmqtrain.exchange.members import Members
from zmqtrain.exchange.optimizer import require_elementwise
from zmqtrain.exchange.own_team import OwnTeam
from zmqtrain.exchange.pieces import Piece
from zmqtrain.exchange.pushes import Pushes, Turn
from zmqtrain.exchange.server_changes import BEGIN, SITS_OUT, ServerChanges
from zmqtrain.exchange.server_heads import FcHeads, Heads
from zmqtrain.exchange.server_messages import (
    Configuration,
    differing,
    kept_label,
)
from zmqtrain.exchange.server_reads import ServerReads
from zmqtrain.exchange.server_settings import ModelServerSettings
from zmqtrain.exchange.server_start import PiecesOfCheckpoint, configuration_of, division, numbers_of, send_initial
from zmqtrain.exchange.under_way import UnderWay
from zmqtrain.membership.client import Membership
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.topology.elastic import ASKING
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload


class ModelServerExchange:
    """Implements `zmqtrain.exchange.base.Exchange` with servers that hold the parameters and run the optimizer.

    An error of the exchange wakes the replica (`Replica.abort`), and the next `end_step` or `settle` raises it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: ModelServerSettings,
        *,
        recorder: Recorder | None = None,
        members: Members | None = None,
        membership: Membership | None = None,
    ) -> None:
        """``members``: given if they survive losses. ``membership``: given if other servers may come to serve shards."""
        self._members: Members | None = members
        self._changes: ServerChanges | None = None
        self._own_team: OwnTeam | None = None  # if groups have several workers, and may lose some
        self._next = 0  # the step after the last one that has begun
        self._kept_by: dict[int, PeerId] = {}  # shard -> the server that was told to keep the last checkpoint
        self._beside: Beside | None = None  # if workers may come late
        self._endpoint = endpoint
        self._settings = settings
        self._heads = Heads(endpoint, settings.servers, membership=membership)
        self._fc: FcHeads | None = None
        if settings.fc_server is not None:
            number = len(settings.servers) if settings.fc_copied else None
            self._fc = FcHeads(settings.fc_server, number, membership)
        self._recorder: Recorder = recorder or NullRecorder()
        self._group = Group(
            endpoint,
            settings.groups[settings.group],
            settings.position,
            f"model_server/{settings.group}",
            timeout_s=settings.barrier_s,
        )
        self._turn = Turn(self._group, whole=True)
        judges = self._group
        if settings.policy == "sync":
            all_workers = tuple(peer for group in settings.groups for peer in group)
            rank = all_workers.index(endpoint.peer)
            judges = Group(endpoint, all_workers, rank, "model_server", timeout_s=settings.barrier_s)
        self._replica: Replica | None = None
        self._base: OptimizerSpec | None = None
        self._compensation = settings.compensation
        self._changed: Sequence[Mapping[str, Value] | None] = ()
        self._pieces: dict[int, list[Piece]] = {}  # bucket -> all its pieces
        self._cuts: dict[int, Cuts] = {}  # bucket -> where pieces divide parameters
        self._first: dict[int, list[Piece]] = {}  # bucket -> the pieces whose initial values come from this worker
        self._under_way = UnderWay(self._begin, self._abort, overlap=settings.overlap)
        self._clip: GroupClip | None = None
        self._pushes = Pushes(endpoint, settings, self._heads, self._recorder, judges)
        self._resumed: tuple[PiecesOfCheckpoint, int] | None = None
        self._cut: tuple[Piece, ...] = ()

    @classmethod
    def of(cls, context: ExchangeContext) -> ModelServerExchange:
        """The exchange with the topology file's settings."""
        worker = context.worker
        settings = ModelServerSettings.of(worker.topology, worker.placement, worker.role, worker.timeouts)
        if not context.scaled:
            settings = replace(settings, judges=False)
        members = context.members if context.members.survives else None
        membership = worker.membership if worker.topology.moves_shards else None
        if membership is not None and members is None:
            what = "are kept twice" if worker.topology.replicated else "move"
            raise UsageError(f"shards {what} only in runs of tasks that carry on without lost workers: remove {ASKING}")
        return cls(worker.endpoint, settings, recorder=worker.recorder, members=members, membership=membership)

    @property
    def synchronous(self) -> bool:
        return self._settings.policy == "sync"

    @property
    def averaged(self) -> bool:
        return False

    @property
    def model(self) -> RunModel:
        return RunModel.SERVERS

    @property
    def moves(self) -> bool:
        """Whether the servers' parameters may change between two steps of a group."""
        return not self.synchronous and (len(self._settings.groups) > 1 or self._team is not None)

    async def start(self, replica: Replica, *, restored: bool = False) -> int | None:
        """Configure the servers (worker 0), give them the first values unless ``restored``, and read what they hold."""
        settings = self._settings
        restored = restored and self._resumed is None
        self._endpoint.serve("refused", self._on_refused)
        self._replica = self._pushes.replica = replica
        given = replica.hyperparameters()
        self._base = self._compensation.of(given)
        require_elementwise(self._base)
        if settings.group == settings.position == 0:
            self._recorder.event("momentum", **self._compensation.describe(given))
        late = self._take_part()
        numbers = numbers_of(replica.buckets)
        checkpoint, resumed = (None, None) if self._resumed is None else self._resumed
        configuration = configuration_of(
            replica.buckets,
            self._base,
            given,
            settings,
            self._compensation,
            self._members,
            restored=restored,
            resumed=resumed,
        )
        cut = self._cut = configuration.pieces()
        if self._pushes.compression is not None:
            self._pushes.compression.start(replica.buckets, numbers, cut, settings.position)
        for bucket in replica.buckets:
            number = numbers[bucket.index]
            own = [piece for piece in cut if piece.bucket == number]
            if bucket.starts and isinstance(bucket.gradients, TensorPayload):
                self._cuts[bucket.index] = Cuts(bucket.starts, [piece.start for piece in own], bucket.gradients.tensor.dtype)
            self._pieces[bucket.index] = own
            first = settings.group == 0 and settings.position == configuration.buckets[number].first
            if first and not restored and not late:
                self._first[bucket.index] = own
        self._divide()
        if late and self._members is not None:
            # Before the others wait for this worker in their steps: then they would not come to answer.
            assert self._beside is not None
            await self._beside.take([peer for peer in self._members.at(0) if self._alike(peer)])
            first_step = await self._members.join()
            if self._own_team is None:
                await self._read_entered()
            else:
                await self._own_team.entered()
            return first_step
        starting = [self._configure(configuration)] if settings.group == settings.position == 0 else []
        await together(
            self._reads().initial(),
            send_initial(self._endpoint, settings.servers, replica.buckets, self._first, checkpoint),
            *starting,
        )
        self._state_begin()
        for bucket in replica.buckets:
            replica.parameters_ready(bucket)
        return None

    def _state_begin(self) -> None:
        """Tell the auditor with what this worker begins."""
        pieces = {each.index: (bucket, each.start, each.stop) for bucket, of in self._pieces.items() for each in of}
        self._recorder.audit("begins with", life=self._life, versions=dict(self._pushes.versions), pieces=pieces)

    async def _configure(self, configuration: Configuration) -> None:
        if configuration.elastic is not None:  # first, since workers send it activations once they have parameters
            await self._ask_fc(BEGIN, configuration.elastic, configuration.keeps_places)
        await self._ask_servers("configure", configuration.to_value())

    def _take_part(self) -> bool:
        """If workers may be lost: follow who takes part. Returns whether this worker comes late."""
        members, settings = self._members, self._settings
        if members is None:
            return False
        groups = settings.groups if max(map(len, settings.groups)) > 1 else ()
        self._changes = ServerChanges(
            self._heads, members, groups, ask_fc=self._ask_fc, timeout_s=settings.barrier_s, recorder=self._recorder
        )
        replica = self._replica_started()
        self._beside = Beside(
            self._endpoint, replica, lambda: bool(self._pushes.versions), late=members.late, timeout_s=settings.barrier_s
        )
        if groups:
            self._own_team = OwnTeam(members, changed=self._change_teams, read=self._read_entered)
        return members.late

    def _alike(self, peer: PeerId) -> bool:
        """Whether a worker has the same part of the model."""
        settings = self._settings
        return not settings.whole_groups or any(group[settings.position] == peer for group in settings.groups)

    @property
    def _team(self) -> Team | None:
        """This worker's team now, if groups have several workers and may lose some."""
        return None if self._own_team is None else self._own_team.now

    @property
    def _life(self) -> int | None:
        """How servers know this worker, or its team, if it may be lost."""
        if self._members is None:
            return None
        return self._members.own_incarnation if self._team is None else self._team.life

    def _divide(self) -> None:
        """Take this worker's part of what its group exchanges."""
        settings, me = self._settings, self._endpoint.peer
        peers = settings.groups[settings.group] if self._team is None else self._team.peers
        if self._team is not None:
            name = f"model_server/{settings.group}/{self._team.life}"
            self._group = Group(self._endpoint, peers, peers.index(me), name, timeout_s=settings.barrier_s)
        for index, pieces in self._pieces.items():
            self._pushes.mine[index] = [piece for piece in pieces if owner_of(piece.position, peers) == me]

    def _change_teams(self) -> Awaitable[None]:
        """The team is another one. Returns what ends once nothing is done any more with what the old one has under way."""
        self._divide()
        return self._under_way.give_up(self._replica_started().parameters_ready)

    async def _read_entered(self) -> None:
        await self._reads().entered()
        self._state_begin()
        for bucket in self._replica_started().buckets:
            self._replica_started().parameters_ready(bucket)

    def begin_step(self, step: int) -> None:
        turn = self._turn
        if self._members is not None:
            slot = self._members.slot(step)
            assert slot is not None, f"step {step} has no batch for this worker"
            turn = Turn(self._group, self._whole, self._life, slot.torn)
            self._recorder.audit("takes", step=step, slot=slot.number)
        self._take_turn(step, turn)
        clips = self._clips_itself
        if clips or self._settings.judges:
            clip_norm = self._settings.clip_norm if clips else 0.0
            self._clip = GroupClip(len(self._replica_started().buckets), clip_norm, judges=self._settings.judges)

    def _take_turn(self, step: int, turn: Turn) -> None:
        """Buckets that are ready from now on are exchanged for ``step``."""
        replica = self._replica_started()
        assert self._base is not None
        if self._beside is not None:
            self._beside.rests = False
        self._turn, self._next = turn, step + 1
        self._under_way.begin(step, len(replica.buckets))
        # Read now, since a schedule may change them before the last bucket is pushed.
        self._changed = differing(self._compensation.of(replica.hyperparameters()), self._base)

    @property
    def _whole(self) -> bool:
        """Whether nobody of the group is lost."""
        return self._group.size == len(self._settings.groups[self._settings.group])

    async def sit_out(self, step: int) -> None:
        """In synchronous training: the group pushes that it has no gradient. So it always has the parameters of the others, and can
        take over what one of these leaves when it is lost."""
        assert self.synchronous, "groups that do not wait for each other have no steps in common"
        await self.settle()
        await self._tell_fc(SITS_OUT, self._life, step)
        self._take_turn(step, Turn(self._group, self._whole, self._life, nothing=True))
        self._clip = None
        for bucket in self._replica_started().buckets:
            self._under_way.add(bucket)
        await self.end_step()
        await self.settle()

    def exchanges(self, step: int) -> bool:
        return True

    def bucket_ready(self, bucket: Bucket) -> None:
        if (cuts := self._cuts.get(bucket.index)) is not None and isinstance(bucket.gradients, TensorPayload):
            cuts.say_reached(bucket.gradients.tensor)
        self._under_way.add(bucket)

    async def end_step(self) -> None:
        await self._under_way.all_added()
        if not self._settings.overlap or self._repeats:
            await self.settle()
        if self._repeats and self._turn.life != self._life and self._own_team is not None:  # the step was given up
            await self._own_team.entered()
        if self._beside is not None:
            await self._beside.give()

    async def may_begin(self, step: int) -> bool:
        return True

    def repeats(self, step: int) -> bool:
        team = self._team
        if not self._repeats or team is None or self._members is None or self._turn.life == team.life:
            return False
        return self._members.first_step(team) <= step

    @property
    def _repeats(self) -> bool:
        """Whether a step that is given up may have to be trained again: then no other one begins before it has ended."""
        return self._members is not None and self._members.repeats

    async def settle(self) -> None:
        await self._under_way.settle()

    async def keep(self, step: int, *, last: bool, in_turn: bool = True) -> None:
        """Servers that other groups may change at any moment also provide what they keep for group 0, for `read`."""
        arguments = step, self.moves and not last, in_turn and not last

        async def keep(shard: int) -> None:
            async def attempt(server: PeerId) -> None:
                await self._heads.request_of(server, shard, "checkpoint", *arguments, timeout=self._settings.request_s)
                self._kept_by[shard] = server

            await self._heads.ask(shard, attempt)

        await together(*map(keep, self._heads.shards))

    async def read(self, label: str, *, kept: int | None = None, last: bool = False) -> None:
        """Read the parameters of one moment. For its next step a group reads buckets at different moments, while others push, so it
        reads once more here. That is not needed in synchronous training; with snapshots only for what is kept a moment later."""
        settings = self._settings
        # In the end each reads by itself, so that nobody waits for one who may begin again without another group that is lost then.
        together = settings.whole_groups and not last
        alone = self._members is not None and not together  # then the caller is the one that reads
        if self._members is None and settings.group != 0:
            return
        if not (last or (self.moves and (kept is not None or not settings.snapshot))):
            return
        versions = dict(self._pushes.versions)
        if kept is not None:
            await self._reads(alone=alone).shown(kept_label(kept), asked=self._kept_by)
        else:
            await self._reads(alone=alone).shown(label, asks=alone or settings.position == 0, together=together)
        if self._team is not None:  # it goes on with what all of its team have
            self._pushes.versions = versions
        for bucket in self._replica_started().buckets:
            self._replica_started().parameters_ready(bucket)

    def center(self, bucket: Bucket) -> Payload:
        raise AssertionError("model servers have no center")

    def weight(self, group: Group) -> float | None:
        raise AssertionError("the run's model is the servers'")

    async def require_alike(self, group: Group, tag: str) -> None:
        return None

    async def leave(self) -> None:
        plan = None if self._members is None else self._members.slots
        era = None if plan is None else plan.eras[-1]
        if self._beside is not None:
            self._beside.rests = True
            await self._beside.give()
        if self._own_team is not None:  # servers must not wait for a team that they have not let in yet
            await self._own_team.entered()
        if self._replica is None:
            return
        if plan is not None and self.synchronous and self._members is not None:
            era = plan.eras[-1]
            due = {self._next, max(self._next, era.since)}
            if any(self._members.slot(step) is not None or self._members.sits_out(step) for step in due):
                return  # because of a change meanwhile
        # The era until now: a change meanwhile may have left this worker something to train.
        since: list[Value] = [] if era is None else [era.since]
        await together(self._ask_servers("left", *since), self._tell_fc("left", *since))

    async def stop(self, *, failed: bool = False) -> None:
        """Tell the servers that this worker has finished. Call `settle` first; pending transfers are abandoned, so that a run that
        stops early waits for no other worker."""
        if self._members is not None:
            await self._members.stop()
        if self._own_team is not None:
            await self._own_team.stop()
        await self._under_way.cancel()
        self._pushes.arithmetic.close()
        if self._replica is None or (failed and self._members is not None and self._members.survives):
            return
        own: list[Value] = [] if self._members is None else [self._members.own_incarnation]
        await together(self._ask_servers("finished", *own), self._tell_fc("finished", *own))

    def staleness(self) -> Sequence[int]:
        result, self._pushes.staleness = self._pushes.staleness, []
        return result

    def state_dict(self) -> dict[str, Value]:
        """Gradients that compression has not sent yet, and which piece is which. All other state is the servers'."""
        residuals = {} if self._pushes.compression is None else self._pushes.compression.state_dict()
        return {"residuals": residuals, "pieces": _in_values(self._cut)}

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        residuals = state.get("residuals")
        if not isinstance(residuals, dict):
            return
        if self._pushes.compression is not None:
            self._pushes.compression.load_state_dict(residuals)
        elif residuals:
            raise CheckpointError(
                "the checkpoint has gradients that compression has not sent yet, and this run has no compression, so they would be "
                "lost: resume with the old [exchange] compression"
            )

    def division(self, replica: Replica) -> list[Value]:
        return _in_values(division(replica.buckets, self._settings))

    def hand_to_servers(self, pieces: PiecesOfCheckpoint, step: int) -> None:
        self._resumed = pieces, step

    def _reads(self, *, alone: bool | None = None) -> ServerReads:
        """Reads of all of this worker's pieces at once. ``alone``: of all pieces of its part of the model, since others of its
        group may be lost meanwhile; by default if any may."""
        settings = self._settings
        alone = self._members is not None if alone is None else alone
        pieces = self._pieces if alone else self._pushes.mine
        return ServerReads(
            self._endpoint,
            self._heads,
            None if alone else self._group,
            [(bucket, pieces[bucket.index]) for bucket in self._replica_started().buckets],
            self._pushes.note,
            life=self._life,
            request_s=settings.request_s,
            barrier_s=settings.barrier_s,
            recorder=self._recorder,
        )

    async def _ask_servers(self, method: str, *values: Value) -> None:
        await self._heads.request_all(method, *values, timeout=self._settings.request_s)

    async def _ask_fc(self, method: str, *values: Value) -> list[Value]:
        """A request to the FC server, if there is one. Returns its answer."""
        if self._fc is None:
            return []

        async def ask(server: PeerId) -> Value:
            return (await self._endpoint.request(server, method, *values, timeout=self._settings.barrier_s)).meta

        return [await self._fc.ask(ask)]

    async def _tell_fc(self, method: str, *values: Value) -> None:
        if self._members is not None:  # otherwise only the layers before it speak with it
            await self._ask_fc(method, *values)

    # The life of a bucket.

    def _begin(self, bucket: Bucket, step: int) -> Coroutine[Any, Any, None]:
        # The step's values are passed along: the next step may begin before this exchange pushes its gradients.
        exchange = self._pushes.go(bucket, step, self._changed[bucket.parameter_group], self._clip, self._turn)
        if self._team is None or self._settings.whole_groups:  # whole groups do not go on without one
            return exchange
        return self._unless_lost(exchange, self._team.peers)

    async def _unless_lost(self, exchange: Coroutine[Any, Any, None], team: tuple[PeerId, ...]) -> None:
        try:
            await exchange
        except PeerLostError as error:
            if error.peer not in team:
                raise
            # A change of the team cancels this. If all still see that worker, there is none: then this one must end.
            await asyncio.sleep(self._settings.request_s)
            raise

    def _abort(self, error: BaseException) -> None:
        if self._replica is not None:
            self._replica.abort(error)

    @property
    def _clips_itself(self) -> bool:
        return self._settings.clip_norm > 0 and not self.synchronous

    def _replica_started(self) -> Replica:
        assert self._replica is not None, "start() comes first"
        return self._replica

    async def _on_refused(self, caller: PeerId, tag: Value, reason: str) -> Value:
        if caller in self._settings.servers:
            self._under_way.fail(ProtocolError(f"{caller} refused {tag!r}: {reason}"))
        return None


def _in_values(cut: Sequence[Piece]) -> list[Value]:
    return [[piece.bucket, piece.start, piece.stop, piece.server] for piece in cut]
