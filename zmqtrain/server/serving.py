"""What a model server does once it is configured: pushes and orders arrive, updates are made, parameters are sent.

`aggregator` and `staleness` decide, `shard` computes, and this module moves the messages::

    [ push -> aggregator -> shard -> parameters ] ...
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from zmqtrain.data.teams import owner_of
from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.events import Recorder
from zmqtrain.exchange.arithmetic import INLINE_BYTES, Arithmetic
from zmqtrain.exchange.norm_limit import NormLimit
from zmqtrain.exchange.server_messages import (
    Configuration,
    ReadMeta,
    entered_tag,
    initial_tag,
    kept_label,
    parameters_tag,
    shown_tag,
)
from zmqtrain.net.endpoint import Endpoint, PeerId, Subscription, Tag
from zmqtrain.server.aggregator import Aggregator, Batch, Keep, Order, OrderedEvent, Push, Update
from zmqtrain.server.background import Refusals, ServerTasks
from zmqtrain.server.checkpoint import keep_pieces
from zmqtrain.server.gate import OPEN, Gate
from zmqtrain.server.load import LoadEvents
from zmqtrain.server.momentum_sensor import Sensors
from zmqtrain.server.norm import ServerSum
from zmqtrain.server.parse import parse_push
from zmqtrain.server.phantom_shard import PhantomSum
from zmqtrain.server.rate_recovery import Recovery
from zmqtrain.server.settings import ServerCheckpoints, ServerSettings
from zmqtrain.server.shard import GroupSum
from zmqtrain.server.shard_entry import Loan, ShardEntry
from zmqtrain.server.staleness import Policy, staleness_values
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Value
from zmqtrain.wire.value import ValuePayload

T = TypeVar("T")


@dataclass(slots=True)
class Shard:
    """The part of the model that one server holds, and statistics of its updates. Empty before it is configured."""

    entries: dict[int, ShardEntry] = field(default_factory=dict)
    """The pieces, by index."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Staleness -> the number of gradients that had it."""
    batches: Counter[int] = field(default_factory=Counter)
    """Piece -> the number of batches that count in it."""
    last_staleness: dict[tuple[int, int], int] = field(default_factory=dict)
    """(group, piece) -> the tag of its last push."""
    sensors: Sensors = field(default_factory=Sensors)
    limit: NormLimit | None = None
    """The limit to the growth of gradients, if there is one."""
    recovery: Recovery | None = None
    """The recovery of the fitted learning rate, where that may rise again."""

    @property
    def updates(self) -> int:
        """The number of updates of pieces so far."""
        return sum(entry.version for entry in self.entries.values())

    def apply(self, updates: Sequence[Update], factor: float = 1.0) -> None:
        """Run the optimizer once for each update, with ``factor`` times its gradient, or less where that is limited."""
        if self.limit is not None:
            applied = [update for update in updates if not update.passed_over]
            factor *= self.limit.factor({each.piece: self.entries[each.piece].norm(each.gradient) for each in applied})
        recovery, rate = self.recovery, 1.0
        if recovery is not None:
            rate = recovery.look([(each.piece, each.gradient, each.reads[0][2]) for each in updates if not each.passed_over])
        for update in updates:
            entry = self.entries[update.piece]
            if update.passed_over:
                entry.pass_over()
                continue
            entry.update(update.gradient, update.hyperparameters, factor, rate)
            if recovery is not None:
                recovery.updated(update.piece)
            self.sensors.applied(entry, update.gradient, update.reads[0][2], factor)

    def squares(self, updates: Sequence[Update]) -> float:
        """The sum of squares of all the updates' gradients."""
        return math.fsum(self.entries[update.piece].squares(update.gradient) for update in updates)

    def count(self, update: Update) -> int:
        """Count the staleness of an update's gradients. Returns the piece's version after the update."""
        after = self.entries[update.piece].version
        if not update.passed_over:
            self.batches[update.piece] += len(update.reads) - len(update.skipped)
        for group, _, version in update.reads:
            staleness = after - 1 - version
            self.staleness[staleness] += 1
            self.last_staleness[group, update.piece] = staleness
        return after

    def state_held(self, recorder: Recorder) -> None:
        """Tell the auditor the shard's final state."""
        recorder.audit("held", pieces={index: (entry.piece, entry.memory()) for index, entry in self.entries.items()})


def report(of: Mapping[int, Shard], recorder: Recorder) -> None:
    """Record the statistics of a server, which has served these shards, by number, to the end."""
    shards = of.values()
    fits = [(momentum, seen) for momentum, seen in (shard.sensors.fitted() for shard in shards) if momentum is not None]
    seen = sum(updates for _, updates in fits)
    staleness = sum((shard.staleness for shard in shards), Counter[int]())
    batches = [shard.batches[piece] for shard in shards for piece in shard.entries]
    recorder.event(
        "server",
        momentum=sum(momentum * updates for momentum, updates in fits) / seen if seen else None,
        momentum_updates=seen,
        updates=sum(shard.updates for shard in shards),
        pushes=sum(staleness.values()),
        batches=min(batches, default=None),
        batches_most=max(batches, default=None),
        shards=[*sorted(of)],
        **staleness_values(staleness),
    )


@dataclass(frozen=True, slots=True)
class ServerTools:
    """What a server works with from its start to its end."""

    endpoint: Endpoint
    settings: ServerSettings
    recorder: Recorder
    checkpoints: ServerCheckpoints | None
    arithmetic: Arithmetic
    background: ServerTasks


class Serving:
    """Serves a filled shard. Make one, `begin`, and `run` it until it is cancelled."""

    def __init__(
        self,
        tools: ServerTools,
        configuration: Configuration,
        shard: Shard,
        *,
        first_step: int,
        finished: Set[PeerId],
        gate: Gate = OPEN,
    ) -> None:
        """``finished``: the workers that need no more answers; the owner adds to it. ``gate``: what everything that workers are
        sent must pass."""
        self.lock = asyncio.Lock()
        """One push, leaving or ordered event at a time. Whoever calls the methods below that need it holds it."""
        self.gate = gate
        self.admitted: set[tuple[int, int]] = set()
        """(piece, life) of the parameters that were sent to a process for its first step."""
        self.answered: dict[tuple[int, int], int] = {}
        """(group, piece) -> the step for which its parameters were last sent."""
        self.owed: set[tuple[PeerId, Tag]] = set()
        """What workers wait for, and were not sent yet; the owner adds to it."""
        self.on_sent: Callable[[], None] | None = None
        """Called whenever something is sent that was owed."""
        self._endpoint, self._recorder, self._background = tools.endpoint, tools.recorder, tools.background
        self._checkpoints, self._arithmetic = tools.checkpoints, tools.arithmetic
        self._configuration, self._shard, self._finished = configuration, shard, finished
        self._elastic = configuration.elastic is not None
        self._several = self._elastic and any(len(members) > 1 for members in configuration.groups)
        self._gone: set[int] = set()  # groups
        self.lives: dict[int, int] = {}
        """group -> which of its teams trains, if workers may be lost."""
        self.teams: dict[int, tuple[PeerId, ...]] = {}
        """group -> the workers of that team."""
        self.held: dict[int, int] = {}
        """group -> its team that trains no more; its place is kept for the team that follows it."""
        self._again: dict[int, set[int]] = {}  # group -> pieces with a step that its team trains once more, until it pushes them
        self._late: dict[int, set[int]] = {}  # group -> pieces whose next answer is what its team begins with
        if configuration.keeps_places:
            for entry in shard.entries.values():
                entry.keep_before()
        self._group_of = {peer: group for group, members in enumerate(configuration.groups) for peer in members}
        self._position_of = {peer: place for members in configuration.groups for place, peer in enumerate(members)}
        self._kept: set[int] = set()  # steps of checkpoints
        self._refusals = Refusals(tools.endpoint, "refused", tools.recorder, tools.background, timeout_s=tools.settings.request_s)
        policy = Policy(configuration.policy, configuration.bound)
        sync = policy.kind == "sync"
        self._clip_norm = configuration.clip_norm if sync else 0.0
        ordered = configuration.snapshot and not sync and bool(shard.entries)
        # Servers without a piece take no part: they see no steps.
        holding = sorted({piece.server for piece in configuration.pieces()})
        self._sum = ServerSum(tools.endpoint, [configuration.servers[index] for index in holding], tools.settings.barrier_s)
        order: Order = "none"
        if ordered and len(configuration.servers) > 1:
            order = "decide" if tools.settings.index == 0 else "follow"
        self.aggregator = Aggregator(
            list(shard.entries),
            policy,
            len(configuration.groups),
            sums=PhantomSum if configuration.phantom else GroupSum,
            first_step=first_step,
            whole=ordered or (bool(self._clip_norm) and bool(shard.entries)),
            order=order,
        )

    def begin(self, there: Collection[PeerId] = ()) -> None:
        """Send every group that is there the initial values; if groups of several workers may have lost some, those who are
        ``there``."""
        groups = len(self._configuration.groups)
        for peer in there if self._several else ():
            for piece in self._shard.entries:
                if self._has_part(peer, piece):
                    self._send_values_to(peer, self._group_of[peer], piece, initial_tag(piece))
        for group in () if self._several else self.lives if self._elastic else range(groups):
            for piece in self._shard.entries:
                self.send_values(group, piece, initial_tag(piece), everybody=self._elastic)
        self._shard.sensors.watch(self._shard.entries.values(), groups)

    async def run(self, pushes: Subscription, orders: Subscription) -> None:
        """Handle arriving messages. Does not return; raises errors."""
        await together(self._take_pushes(pushes), self._take_orders(orders))

    # Arriving messages.

    async def keep(self, keep: Keep, *, ordered: bool) -> None:
        """Keep the shard for a checkpoint. ``ordered``: with snapshots, when it is this event's turn, so that all servers keep the
        same version; otherwise at once, since the run ends."""
        if not self._shard.entries:  # the collector knows that this server has no part
            return
        async with self.lock:
            if ordered:
                await self._carry_out(partial(self.aggregator.keep, keep), 0)
            else:
                self._keep(keep)

    async def show(self, label: str, to: PeerId | None, group: int) -> None:
        """Show the shard as it is now to the worker ``to``; ``None``: to those of ``group``, each its own part."""
        async with self.lock:
            self._show(label, to, group)

    # Under the lock.

    async def push(self, push: Push, nbytes: int) -> None:
        """Take a gradient of ``nbytes`` bytes. Those of processes that train no more are dropped."""
        if push.life is not None and self.lives.get(push.group) != push.life:
            return
        again = self._again.get(push.group)
        if again and push.piece in again:
            # The team before has pushed this step, and the same batch counts only once.
            standing = self.aggregator.standing(push.piece, push.group, push.step)
            assert standing != "new"
            again.discard(push.piece)
            if standing == "answered":
                self.answer(push.group, push.piece, push.step + 1)
            return
        await self._carry_out(partial(self.aggregator.pushed, push), nbytes)

    # Also under the lock, if workers may be lost.

    async def drop(self, group: int) -> None:
        """Go on without the present team of the group, if it has one. What it has pushed before still counts; nothing else will."""
        life = self.lives.pop(group, None)
        life = self.held.pop(group, None) if life is None else life
        self._forget(group)
        if life is not None:
            self._recorder.audit("dropped", group=group, life=life)
            await self._carry_out(partial(self.aggregator.drop, group, life), 0)

    def hold(self, group: int) -> None:
        """As `drop`, but others wait for the team that follows the present one, and has its place."""
        self.held[group] = life = self.lives.pop(group)
        self._forget(group)
        self._recorder.audit("keeps", group=group, life=life)
        self.aggregator.hold(group, life)

    async def follow(self, group: int, life: int, first: int) -> None:
        """This team has the place that was kept for it. It is sent the parameters for step ``first``."""
        del self.held[group]
        self.lives[group] = life
        for piece, begins in (await self._compute(partial(self.aggregator.follow, group, first), 0)).items():
            if begins in ("again", "again before"):
                self._again.setdefault(group, set()).add(piece)
            if begins == "answer":
                self._late.setdefault(group, set()).add(piece)
            elif begins != "later":
                self.admit(group, piece, before=begins == "again before")

    async def enter(self, step: int, lives: Mapping[int, int]) -> None:
        """From ``step`` on these teams of the groups train, and no others, but for those that are `held`. New ones are sent the
        parameters for it."""
        for group in [group for group, life in self.lives.items() if lives.get(group) != life]:
            await self.drop(group)
        self.lives = dict(lives)
        self._gone.clear()
        for group in sorted({*lives, *self.held}):
            if self.aggregator.away(group):
                self._recorder.audit("entered", group=group, step=step)
            await self._carry_out(partial(self.aggregator.enter, group, step), 0)

    def _forget(self, group: int) -> None:
        self._again.pop(group, None)
        self._late.pop(group, None)

    def progress(self, life: int) -> tuple[int, int] | None:
        """How far a dropped life has got (`Aggregator.progress`)."""
        return self.aggregator.progress(life)

    async def rest(self, group: int) -> None:
        """The group has nothing to train for now, so the others do not wait for it."""
        self._recorder.audit("rests", group=group)
        await self._carry_out(partial(self.aggregator.rest, group), 0)

    # The end.

    async def let_go(self, left: Set[PeerId]) -> None:
        """Stop waiting for groups all of whose workers have ``left``."""
        for group, members in enumerate(self._configuration.groups):
            if left >= set(members) and group not in self._gone:
                self._gone.add(group)
                self._recorder.audit("left", group=group)
                async with self.lock:
                    await self._carry_out(partial(self.aggregator.left, group), 0)

    async def _take_pushes(self, pushes: Subscription) -> None:
        entries, groups = self._shard.entries, self._configuration.groups
        load = LoadEvents(self._recorder)
        teams = self._several and not self._configuration.whole_groups  # whose workers take over each other's pieces
        while True:
            sender, tag, payload = await pushes.get()
            load.begin()
            try:
                push = parse_push(sender, tag, payload, entries, groups, teams=teams)
                async with self.lock:
                    self.check_present(push)
                    await self.push(push, payload.nbytes)
            except ProtocolError as error:
                self._refusals.refuse(sender, tag, error)
            load.done(waiting=pushes.ready, nbytes=payload.nbytes)
            del payload

    def check_present(self, push: Push) -> None:
        """In synchronous training all gradients of an update are of the same parameters. A group that had nothing more to train,
        and was given something after a loss, may have older ones, since the others have gone on meanwhile.
        Raises `ProtocolError`."""
        if not self._elastic or self._configuration.policy != "sync" or self.lives.get(push.group) != push.life:
            return
        entry, again = self._shard.entries[push.piece], self._again.get(push.group, ())
        if push.version < entry.version and push.piece not in again:
            raise ProtocolError(
                f"group {push.group} has trained step {push.step} with version {push.version} of piece {push.piece}, which has "
                f"version {entry.version} by now: the others went on while it had nothing to train, and then a worker was lost; "
                "resume from a checkpoint"
            )

    async def _take_orders(self, orders: Subscription) -> None:
        while True:
            sender, _, payload = await orders.get()
            match payload.meta:
                case ["step" | "left" | "keep" | "show" as kind, int(number)] if sender == self._configuration.servers[0]:
                    event = OrderedEvent(kind, number)
                case _:
                    self._recorder.event("refused", sender=sender, reason="the order did not come from server 0")
                    continue
            async with self.lock:
                await self._carry_out(partial(self.aggregator.ordered, event), INLINE_BYTES)

    # The consequences. All methods run under the lock.

    async def _carry_out(self, decide: Callable[[], list[Batch]], nbytes: int) -> None:
        """Apply and answer what ``decide`` returns."""

        def work() -> list[Batch]:
            batches = decide()
            if batches and not self._clip_norm:
                self._shard.apply(batches[0].updates)
            return batches

        clock = asyncio.get_running_loop().time
        start = clock()
        for number, batch in enumerate(await self._compute(work, nbytes)):
            if self._clip_norm and batch.updates:
                await self._apply_clipped(batch)
            elif number > 0:  # not before the previous batch is answered: its readers must not see this batch's updates
                await self._compute(partial(self._shard.apply, batch.updates), INLINE_BYTES)
            for update in batch.updates:
                version = self._shard.count(update)
                reads = list(update.reads)
                self._recorder.audit(
                    "applied", piece=update.piece, step=reads[0][1], reads=reads, version=version, skipped=update.skipped
                )
            if self._shard.sensors.due(len(batch.updates)) and not self.gate.shut:
                momentum, seen = self._shard.sensors.fitted()
                recovery = self._shard.recovery
                rate = None if recovery is None else recovery.factor
                self._recorder.event("momentum", fitted=momentum, updates=seen, rate=rate)
            if batch.updates and batch.answer:
                name = f"update of {len(batch.updates)} pieces" if len(batch.updates) > 1 else f"update of piece {batch.pieces[0]}"
                self._recorder.add_span(name, "compute", start, clock(), step=batch.answer[0][1] - 1)
                start = clock()
            for group, step in batch.answer:
                for piece in batch.pieces:
                    self.answer(group, piece, step)
            for group in batch.entered:
                for piece in batch.pieces:
                    self.admit(group, piece)
            if batch.keep is not None:
                self._keep(batch.keep)
        for event in self.aggregator.decided:
            for other in self._configuration.servers[1:]:
                try:
                    await self._endpoint.send(other, ("order",), ValuePayload([event.kind, event.number]))
                except PeerLostError:
                    if event.kind != "left":  # a server that has already finished need not know that a group leaves
                        raise
        self.aggregator.decided.clear()

    async def _apply_clipped(self, batch: Batch) -> None:
        """Clip the mean gradient by its norm over all pieces of all servers, then apply it."""
        updates, shard = batch.updates, self._shard
        nbytes = sum(update.gradient.nbytes for update in updates)
        mine = await self._compute(partial(shard.squares, updates), nbytes)
        norm = math.sqrt(await self._sum.of(mine))
        factor = min(1.0, self._clip_norm / (norm + 1e-6))  # like torch.nn.utils.clip_grad_norm_
        await self._compute(partial(shard.apply, updates, factor), nbytes)

    def answer(self, group: int, piece: int, step: int) -> None:
        """Send the group the parameters of a piece for ``step``."""
        if group in self.held or piece in self._again.get(group, ()):  # its team reads them later, or has not asked yet
            return
        if piece in self._late.get(group, ()):
            self._late[group].discard(piece)
            self.admit(group, piece)
            return
        if not self.gate.shut:
            self.answered[group, piece] = step
        self.send_values(group, piece, parameters_tag(piece, step))

    def admit(self, group: int, piece: int, *, before: bool = False) -> None:
        """Send the group's team, which comes late, the parameters of a piece for its first step: ``before`` the last update, or
        now."""
        if group in self.held:
            return
        life = self.lives[group]
        if not self.gate.shut:
            self.admitted.add((piece, life))
        self.send_values(group, piece, entered_tag(piece, life), everybody=True, before=before)

    def send_values(self, group: int, piece: int, tag: Tag, *, everybody: bool = False, before: bool = False) -> None:
        """Send the piece's current values to the one of the group that exchanges it, or to all who are there and have that part of
        the model. ``before``: those before the last update."""
        team = self.teams.get(group, self._configuration.groups[group])
        for peer in team if everybody else (self.peer_of(group, piece),):
            if not everybody or self._has_part(peer, piece):
                self._send_values_to(peer, group, piece, tag, before=before)

    def peer_of(self, group: int, piece: int) -> PeerId:
        """The worker of the group that exchanges the piece."""
        team = self.teams.get(group, self._configuration.groups[group])
        return owner_of(self._shard.entries[piece].piece.position, team)

    def retire(self) -> list[tuple[PeerId, Tag]]:
        """Another server sends everything from now on, as if nothing had been sent. Returns what workers wait for."""
        owed = sorted(self.owed)
        self.owed.clear()
        self.answered.clear()
        self.admitted.clear()
        return owed

    def _send_values_to(self, peer: PeerId, group: int, piece: int, tag: Tag, *, before: bool = False) -> None:
        if self.gate.shut:
            return
        entry, about = self._shard.entries[piece], self.about(group, piece, before=before)
        self._begin_to_send(peer, entry, entry.lend_before(about) if before else entry.lend(about), tag)

    def about(self, group: int, piece: int, *, before: bool = False) -> Value:
        """The header of a piece's current values for the group, or of those ``before`` the last update."""
        version = self._shard.entries[piece].version - before
        return ReadMeta(version, self._shard.last_staleness.get((group, piece), 0)).to_value()

    def send(self, group: int, entry: ShardEntry, loan: Loan, tag: Tag) -> None:
        """Send what the entry has lent."""
        self._begin_to_send(self._configuration.groups[group][entry.piece.position], entry, loan, tag)

    def _begin_to_send(self, to: PeerId, entry: ShardEntry, loan: Loan, tag: Tag) -> None:
        if (to, tag) in self.owed:
            self.owed.remove((to, tag))
            if self.on_sent is not None:
                self.on_sent()
        self._background.run(self._send(to, tag, loan, entry.piece.bucket, self.gate, self.gate.ticket()))

    async def _send(self, to: PeerId, tag: Tag, loan: Loan, priority: int, gate: Gate, ticket: int) -> None:
        try:
            await gate.passed(ticket)
            loan.sent = await self._endpoint.send(to, tag, loan.payload, priority=priority)
        except PeerLostError:
            if to not in self._finished and not self._elastic:
                raise
        finally:
            if loan.sent is None:
                loan.give_back()

    def _keep(self, keep: Keep) -> None:
        """Save the current state in the background. Later updates do not change it."""
        if keep.show:
            self._show(kept_label(keep.step), keep.to, keep.group)
        if keep.step in self._kept:  # asked for once more, in place of a worker that was lost
            return
        if self._elastic:
            self._kept.add(keep.step)
        if self._checkpoints is not None:
            tensors, sidecar = keep_pieces(self._shard.entries, keep.step, self._shard.limit, self._shard.recovery)
            self._background.spawn(self._checkpoints.save(keep.step, tensors, sidecar))

    def _show(self, label: str, to: PeerId | None, group: int) -> None:
        for piece in self._shard.entries:
            if to is None:
                self.send_values(group, piece, shown_tag(piece, label))
            elif self._has_part(to, piece):
                self._send_values_to(to, self._group_of[to], piece, shown_tag(piece, label))

    def _has_part(self, peer: PeerId, piece: int) -> bool:
        """Whether the worker has that part of the model."""
        return self._position_of[peer] in self._configuration.positions(self._shard.entries[piece].piece)

    async def _compute(self, work: Callable[[], T], nbytes: int) -> T:
        return await self._arithmetic.do_sized(work, 0 if self._configuration.phantom else nbytes)
