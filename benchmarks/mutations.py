"""``python -m benchmarks mutations``: faults that are put into the protocol on purpose, each of which the auditor must find.

Each mutation replaces functions of the package while seeds are tried, by name: if a name is gone, it fails. A seed finds it if the
run breaks an invariant with the mutation, and none without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import zmqtrain.exchange.gossip.exchange as gossip
from benchmarks import mutated_grids as grids
from benchmarks import mutated_groups as groups
from benchmarks.case import Case, case_of
from benchmarks.patches import Patches, every
from zmqtrain.data.division import Division
from zmqtrain.data.slots import SlotPlan
from zmqtrain.errors import UsageError
from zmqtrain.exchange.averaging.contents import AveragedContents
from zmqtrain.exchange.averaging.methods import Average, Outer
from zmqtrain.exchange.elastic import ElasticMembers
from zmqtrain.exchange.elastic_sums import ElasticSums
from zmqtrain.exchange.gossip.contents import MixedContents
from zmqtrain.exchange.server_changes import _Members
from zmqtrain.exchange.state_source import NeighboursState
from zmqtrain.membership.actions import Answer
from zmqtrain.membership.barrier import Barrier, Barriers
from zmqtrain.membership.heard import Heard
from zmqtrain.membership.roster import Roster
from zmqtrain.membership.state import MemberTable, Presence
from zmqtrain.membership.view import View
from zmqtrain.merged_fc.queue import FcQueue
from zmqtrain.merged_fc.server import FcServer
from zmqtrain.net.lane import SendLane
from zmqtrain.server.aggregator import Aggregator, Batch, _Unit
from zmqtrain.server.lives import Lives
from zmqtrain.server.serving import Serving
from zmqtrain.server.shard import TensorEntry
from zmqtrain.server.staleness import StalenessMachine
from zmqtrain.simulate.explore import Trial, horizon_of, try_seed
from zmqtrain.simulate.succession import Records
from zmqtrain.topology.load import load_topology
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.memory import numbers_of

SHAPES = Path(__file__).parent / "shapes"
#: So many seeds are tried for each.
MOST_SEEDS = 2000


@dataclass(frozen=True, slots=True)
class Mutation:
    """One deliberate fault."""

    name: str
    shape: str
    """The topology file, of `SHAPES`, in which it is looked for."""
    put: Callable[[Patches], None]
    seed: int
    """One that finds it, and soon; of the faults that are drawn now."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this context the package has the fault."""
        patches = Patches()
        try:
            self.put(patches)
            yield
        finally:
            patches.undo()


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a search."""

    mutation: Mutation
    seed: int | None
    """``None``: no seed has found it."""
    seconds: float
    broken: str = ""
    """The first violation."""


@cache
def shape(name: str) -> tuple[Topology, float]:
    """The topology of this name, and how long it takes without faults."""
    file = SHAPES / f"{name}.toml"
    if not file.exists():
        raise UsageError(f"there is no shape {name!r}: {', '.join(sorted(each.stem for each in SHAPES.glob('*.toml')))}")
    topology = load_topology(file)
    return topology, horizon_of(topology)


def tried(mutation: Mutation, seed: int) -> Trial:
    """One seed, with the mutation."""
    topology, horizon_s = shape(mutation.shape)
    with mutation.in_place():
        return try_seed(seed, topology, "random", horizon_s)


@cache
def sound(name: str, seed: int) -> bool:
    """Whether a run of this seed breaks nothing without a mutation; the same for all mutations of a shape."""
    topology, horizon_s = shape(name)
    return not try_seed(seed, topology, "random", horizon_s).broken


def search(mutation: Mutation, seeds: Sequence[int] = range(1, MOST_SEEDS + 1)) -> Found:
    """Try seeds until one finds the mutation."""
    began = time.monotonic()
    for seed in seeds:
        trial = tried(mutation, seed)
        if trial.broken and sound(mutation.shape, seed):
            return Found(mutation, seed, time.monotonic() - began, trial.broken[0])
    return Found(mutation, None, time.monotonic() - began)


def bench_mutations() -> Iterator[Case]:
    """For each mutation the number of the first seed that finds it; -1: none does."""
    for mutation in MUTATIONS:
        found = search(mutation)
        yield case_of("mutations", f"{mutation.name} ({mutation.shape})", -1 if found.seed is None else found.seed, "seed")


# The mutations -----------------------------------------------------------------------------------------------------------------


def update_applied_twice(patches: Patches) -> None:
    due = every(20)

    def make(update: Any) -> Any:
        def mutated(self: TensorEntry, *args: Any) -> None:
            update(self, *args)
            if due():
                update(self, *args)
                self.version -= 1

        return mutated

    patches.around(TensorEntry, "update", make)


def update_lost(patches: Patches) -> None:
    due = every(20)

    def make(update: Any) -> Any:
        def mutated(self: TensorEntry, *args: Any) -> None:
            if due():
                self.version += 1
            else:
                update(self, *args)

        return mutated

    patches.around(TensorEntry, "update", make)


def answered_before_applied(patches: Patches) -> None:
    due = every(20)

    def make(pushed: Any) -> Any:
        def mutated(self: Aggregator, push: Any) -> list[Batch]:
            batches: list[Batch] = pushed(self, push)
            if len(batches) == 1 and batches[0].answer and batches[0].updates and due():
                (batch,) = batches
                return [replace(batch, updates=()), replace(batch, answer=())]
            return batches

        return mutated

    patches.around(Aggregator, "pushed", make)


def batch_not_trained_again(patches: Patches) -> None:
    patches.around(SlotPlan, "_left_by", lambda _: lambda _self, *_args: [])


def counted_batch_trained_again(patches: Patches) -> None:
    def make(left_by: Any) -> Any:
        return lambda self, life, low, high, since: left_by(self, life, max(low - 1, self.eras[-1].since), high, since)

    patches.around(SlotPlan, "_left_by", make)


def torn_batch_counts_twice(patches: Patches) -> None:
    patches.around(_Unit, "_must_not_count", lambda _: lambda _self, push: push.nothing)


def push_that_never_came(patches: Patches) -> None:
    """A server says that a lost worker's push counts which has not arrived."""

    def make(drop: Any) -> Any:
        def mutated(self: _Unit, group: int, life: int) -> Batch:
            batch: Batch = drop(self, group, life)
            if life in self.gone:
                self.gone[life] += 1
            return batch

        return mutated

    patches.around(_Unit, "drop", make)


def lost_group_waited_for(patches: Patches) -> None:
    async def mutated(_self: Serving, _group: int) -> None:
        return None

    patches.around(Serving, "drop", lambda _: mutated)


def place_not_kept(patches: Patches) -> None:
    """Others go on without a group that has lost one of its workers."""

    async def mutated(self: Lives, team: Any) -> None:
        await self._end(team)

    patches.around(Lives, "_end_or_hold", lambda _: mutated)


def bound_not_kept(patches: Patches) -> None:
    def make(ready: Any) -> Any:
        def mutated(self: StalenessMachine) -> Any:
            self._policy = replace(self._policy, bound=100)
            return ready(self)

        return mutated

    patches.around(StalenessMachine, "_ready", make)


def applied_without_one(patches: Patches) -> None:
    due = every(10)

    def make(sync: Any) -> Any:
        def mutated(self: StalenessMachine, leaving: int | None = None) -> Any:
            behind = [each for each in self._clock if each not in self._waiting and each not in self._resting and each != leaving]
            if len(behind) != 1 or not due():
                return sync(self, leaving)
            self._resting.add(behind[0])
            try:
                return sync(self, leaving)
            finally:
                self._resting.discard(behind[0])

        return mutated

    patches.around(StalenessMachine, "_sync", make)


def floor_ignored(patches: Patches) -> None:
    def make(of: Any) -> Any:
        def mutated(value: Any) -> _Members:
            found = of.__func__(_Members, value)
            return _Members(0, found.progress, found.kept)

        return staticmethod(mutated)

    patches.around(_Members, "of", make)


def history_forgotten(patches: Patches) -> None:
    def make(of: Any) -> Any:
        def mutated(self: Lives) -> Any:
            base, changes = of(self)
            return [base, changes[-1:]]

        return mutated

    patches.around(Lives, "history", make)


def sums_divided_wrongly(patches: Patches) -> None:
    async def mutated(self: ElasticSums, *_args: Any) -> int:
        return self._every * self._batch * self.group.size

    patches.around(ElasticSums, "_samples", lambda _: mutated)


def left_samples_forgotten(patches: Patches) -> None:
    patches.around(Division, "_left_by", lambda _: lambda *_args: [])


def turns_left_out(patches: Patches) -> None:
    """What groups with models of their own have left counts as trained."""

    def make(got: Any) -> Any:
        async def mutated(self: ElasticMembers, *args: Any) -> list[tuple[int, bool]]:
            return [(1 << 30, True) for _ in await got(self, *args)]

        return mutated

    patches.around(ElasticMembers, "_what_is_left", make)


def turns_taken_again(patches: Patches) -> None:
    patches.around(MixedContents, "got", lambda _: lambda _self, _life: 0)


def averaged_turns_taken_again(patches: Patches) -> None:
    patches.around(AveragedContents, "got", lambda _: lambda _self, _life: 0)


def left_turns_not_handed_over(patches: Patches) -> None:
    def make(to_value: Any) -> Any:
        def mutated(self: SlotPlan) -> Any:
            eras, handed_on = to_value(self)
            return [[[since, members, first, []] for since, members, first, _ in eras], handed_on]

        return mutated

    patches.around(SlotPlan, "to_value", make)


def lost_with_another_group(patches: Patches) -> None:
    """What only one group had of another one, which was lost before it, counts after its loss, too."""

    def make(go_on: Any) -> Any:
        def mutated(self: SlotPlan, since: int, living: Any, counted: Any) -> None:
            go_on(self, since, living, [(step, True) for step, _ in counted])

        return mutated

    patches.around(SlotPlan, "go_on_without", make)


def copy_taken_for_another_model(patches: Patches) -> None:
    patches.around(AveragedContents, "begin_with", lambda _: lambda _self, _known: None)


def partner_not_believed(patches: Patches) -> None:
    patches.around(MixedContents, "told", lambda _: lambda _self, _step: [])


def sums_not_shared(patches: Patches) -> None:
    async def mutated(_self: ElasticSums, *_args: Any) -> bool:
        return True

    patches.around(ElasticSums, "_share", lambda _: mutated)


def mean_divided_wrongly(patches: Patches) -> None:
    patches.around(Average, "factor", lambda _: lambda _self, groups: groups / 4)


def average_counts_for_some(patches: Patches) -> None:
    async def mutated(_self: ElasticMembers, *_args: Any) -> None:
        return None

    patches.around(ElasticMembers, "_all_are_here", lambda _: mutated)


def state_without_momentum(patches: Patches) -> None:
    """A worker that joins late begins with an outer optimizer of its own."""

    def make(take: Any) -> Any:
        async def mutated(self: NeighboursState, replica: Any, own: Any = lambda name: None) -> None:
            def elsewhere(name: str) -> Any:
                place = own(name)
                return None if place is None else place.empty_like()

            await take(self, replica, elsewhere)

        return mutated

    assert "state" in vars(Outer)
    patches.around(NeighboursState, "take", make)


def state_without_a_bucket(patches: Patches) -> None:
    def make(take: Any) -> Any:
        async def mutated(self: NeighboursState, replica: Any, *args: Any) -> None:
            await take(self, replica, *args)
            numbers_of(replica.buckets[0].parameters)[:1] += 1.0

        return mutated

    patches.around(NeighboursState, "take", make)


def barrier_opens_early(patches: Patches) -> None:
    """The coordinator answers an agreement before the last member has said anything."""

    def make(complete: Any) -> Any:
        def mutated(self: Barrier) -> bool:
            early = self.largest is not None and len(self.missing) == 1 < len(self.members) - 1
            return early or bool(complete(self))

        return mutated

    patches.around(Barrier, "complete", make)


def newest_value_not_largest(patches: Patches) -> None:
    def make(arrive: Any) -> Any:
        def mutated(self: Barrier, peer: str, members: Any, ticket: int, value: int | None, call: int | None = None) -> Any:
            self.largest = None
            return arrive(self, peer, members, ticket, value, call)

        return mutated

    patches.around(Barrier, "arrive", make)


def stale_view_believed(patches: Patches) -> None:
    """Agreements about a view go on although there is a newer one."""
    patches.around(Barriers, "outdate", lambda _: lambda _self, _version, _reason: [])

    def make(agree: Any) -> Any:
        def mutated(self: Roster, peer: str, name: str, value: int, members: Any, version: Any, *args: Any) -> Any:
            return agree(self, peer, name, value, members, None, *args)

        return mutated

    patches.around(Roster, "handle_agree", make)


def dead_host_believed(patches: Patches) -> None:
    """The heartbeats of a host that is gone are believed to go on."""

    def make(look: Any) -> Any:
        def mutated(self: Heard, now: float) -> None:
            self._times = dict.fromkeys(self._times, now)
            look(self, now)

        return mutated

    def deaf(_: Any) -> Any:
        return lambda _self, *_args: []

    patches.around(Heard, "look", make)
    patches.around(Roster, "handle_lost", deaf)


def lost_member_shown(patches: Patches) -> None:
    """Views show workers that are lost as if they were there."""

    def make(view: Any) -> Any:
        def mutated(self: MemberTable, version: int, *, complete: bool) -> View:
            found: View = view(self, version, complete=complete)
            lost = {entry.member.peer: entry.member for entry in self.of_kind("worker") if entry.presence is Presence.LOST}
            return replace(found, members={**found.members, **lost}, lost={})

        return mutated

    patches.around(MemberTable, "view", make)


def member_forgotten(patches: Patches) -> None:
    """The others are not told that a worker is back."""

    def make(ready: Any) -> Any:
        return lambda self, *args: [action for action in ready(self, *args) if isinstance(action, Answer)]

    patches.around(Roster, "handle_ready", make)


def bucket_mixed_twice(patches: Patches) -> None:
    due = every(20)

    def make(average: Any) -> Any:
        def mutated(own: Any, others: Any) -> None:
            average(own, others)
            if due():
                average(own, others)

        return mutated

    patches.around(gossip, "_average", make)


def bucket_not_mixed(patches: Patches) -> None:
    due = every(20)
    patches.around(gossip, "_average", lambda average: lambda own, others: None if due() else average(own, others))


def fc_update_twice(patches: Patches) -> None:
    due = every(10)

    def make(update: Any) -> Any:
        async def mutated(self: FcServer, applied: Any) -> None:
            await update(self, applied)
            if due():
                await update(self, applied)

        return mutated

    patches.around(FcServer, "_update", make)


def fc_batch_counted_again(patches: Patches) -> None:
    """What was computed for a lost worker's batch is forgotten, so it counts once more when another worker trains it."""
    patches.around(FcQueue, "_counts", lambda counts: lambda self, group: True)


def fc_step_again_after_its_update(patches: Patches) -> None:
    """A team's step that was computed for the team before counts again, instead of only for the activations."""

    def make(follow: Any) -> Any:
        def mutated(self: FcQueue, group: int, life: int, first: int) -> None:
            follow(self, group, life, first)
            self._again.pop(group, None)

        return mutated

    patches.around(FcQueue, "follow", make)


def message_not_sent_again(patches: Patches) -> None:
    """After a broken connection the first missing piece is taken to have arrived."""
    patches.around(SendLane, "resume", lambda resume: lambda self, sequence: resume(self, sequence + 1))


async def _never() -> None:
    await asyncio.Event().wait()


def loss_not_noticed(patches: Patches) -> None:
    """A worker waits for ever for a view in which the lost one is missing."""

    async def mutated(_self: ElasticMembers, *_args: Any) -> None:
        await _never()

    patches.around(ElasticMembers, "_newer", lambda _: mutated)


def record_skipped(patches: Patches) -> None:
    """The launcher's journal lacks a record."""
    due = every(5)

    def make(write: Any) -> Any:
        def mutated(self: Records, changes: Any, *, durable: bool) -> None:
            kept = len(self.data)
            write(self, changes, durable=durable)
            if due():
                del self.data[kept:]

        return mutated

    patches.around(Records, "write", make)


MUTATIONS = (
    Mutation("an update is applied twice", "servers-async", update_applied_twice, 1),
    Mutation("an update is lost, and its version is counted", "servers-async", update_lost, 1),
    Mutation("a push is acknowledged before it is applied", "servers-async", answered_before_applied, 1),
    Mutation("a lost worker's batches are not trained again", "servers-async", batch_not_trained_again, 5),
    Mutation("a lost worker's batch that counts is trained again", "servers-async", counted_batch_trained_again, 76),
    Mutation("a batch that counts for some pieces counts for them again", "servers-async", torn_batch_counts_twice, 5),
    Mutation("a lost worker's push counts that has not come", "servers-async", push_that_never_came, 5),
    Mutation("servers go on waiting for a lost group", "servers-sync", lost_group_waited_for, 16),
    Mutation("an update is made without one group's gradient", "servers-sync", applied_without_one, 1),
    Mutation("others do not wait for a group that has lost a worker", "teams-sync", place_not_kept, 2),
    Mutation("groups run ahead of the bound", "servers-bounded", bound_not_kept, 1),
    Mutation("new members begin before the steps that are done", "servers-async", floor_ignored, 8),
    Mutation("a late worker does not learn of earlier changes", "servers-sync", history_forgotten, 5),
    Mutation("sums are divided by the workers that there were", "allreduce", sums_divided_wrongly, 2),
    Mutation("what a lost worker has left of its samples is not trained", "allreduce", left_samples_forgotten, 2),
    Mutation("survivors do not get the sums that others have", "allreduce", sums_not_shared, 7),
    Mutation("a late worker's state lacks an update", "allreduce", state_without_a_bucket, 3),
    Mutation("an agreement ends before the last member's word", "allreduce", barrier_opens_early, 1),
    Mutation("an agreement gives the last value, not the largest", "allreduce", newest_value_not_largest, 7),
    Mutation("an agreement about an old view goes on", "allreduce", stale_view_believed, 6),
    Mutation("the others are not told who is back", "allreduce", member_forgotten, 3),
    Mutation("what a lost group has left counts as trained", "gossip-epoch", turns_left_out, 1),
    Mutation("what a lost group has given others is trained again", "gossip-epoch", turns_taken_again, 1),
    Mutation("what a lost group's averages have had is trained again", "averaging-epoch", averaged_turns_taken_again, 1),
    Mutation("a late group does not learn what others have left", "gossip-epoch", left_turns_not_handed_over, 3),
    Mutation("a copy of a model is taken for another one", "averaging-epoch", copy_taken_for_another_model, 200),
    Mutation("what a partner says of others is not believed", "gossip-epoch", partner_not_believed, 6),
    Mutation("what is lost with a second group counts", "gossip-epoch", lost_with_another_group, 80),
    Mutation("what a lost group of several has left counts as trained", "teams-gossip-epoch", turns_left_out, 8),
    Mutation("what a lost group of several has given others is trained again", "teams-gossip-epoch", turns_taken_again, 16),
    Mutation("a group that is smaller is taken for another one", "teams-averaging-epoch", groups.smaller_group_is_another, 1),
    Mutation("a group that has come back is taken for the lost one", "teams-averaging-epoch", groups.next_group_is_the_same, 8),
    Mutation("one that comes to a group does not learn what is left", "teams-averaging-epoch", left_turns_not_handed_over, 8),
    Mutation("means are divided by the workers that there were", "averaging", mean_divided_wrongly, 2),
    Mutation("an average counts before all have it", "averaging", average_counts_for_some, 22),
    Mutation("a late worker begins without the outer momentum", "averaging-outer", state_without_momentum, 3),
    Mutation("a bucket is mixed twice", "gossip", bucket_mixed_twice, 1),
    Mutation("a bucket that has come is not mixed", "gossip-hypercube", bucket_not_mixed, 1),
    Mutation("a dead host is believed to be alive", "gossip", dead_host_believed, 12),
    Mutation("a view shows a lost worker as if it were there", "averaging-elastic", lost_member_shown, 1),
    Mutation("the loss of a member is waited for without end", "averaging-elastic", loss_not_noticed, 1),
    Mutation("an FC server applies a step twice", "merged-fc", fc_update_twice, 1),
    Mutation("an FC server counts a lost worker's batch again", "merged-fc", fc_batch_counted_again, 3),
    Mutation("an FC server takes a step that is trained again for a new one", "teams-merged", fc_step_again_after_its_update, 2),
    Mutation("a record of the launcher's journal is skipped", "allreduce", record_skipped, 132),
    Mutation("what a broken connection has lost is not sent again", "groups", message_not_sent_again, 2),
    Mutation("a step counts before all have its sums", "grid-elastic", grids.counted_by_some, 1),
    Mutation("a step counts as soon as it has begun", "grid-elastic", grids.begun_is_counted, 1),
    Mutation("the sums of a step that counts are thrown away", "grid-elastic", grids.sums_thrown_away, 13),
    Mutation("what a broken forward did to buffers stays", "grid-elastic", grids.broken_forward_kept, 1),
    Mutation("a batch that counts is trained on the next grid", "grid-elastic", grids.batch_trained_twice, 1),
    Mutation("a batch that was given up is left out", "grid-elastic", grids.batch_left_out, 1),
    Mutation("the state is handed over from the wrong row", "grid-elastic", grids.from_the_wrong_row, 1),
    Mutation("the state is taken from one that has come", "grid-elastic", grids.from_a_newcomer, 4),
    Mutation("the state is handed over without momentum", "grid-elastic", grids.handed_over_without_momentum, 1),
    Mutation("one that comes to a grid has no momentum", "grid-elastic", grids.newcomer_without_momentum, 3),
    Mutation("a grid goes on without one of its workers", "grid-elastic", grids.loss_ignored, 1),
    Mutation("a stale plan of a grid is believed", "grid-elastic", grids.stale_plan_believed, 7),
    Mutation("a grid is formed of those in different views", "grid-elastic", grids.plan_of_another_view, 6),
    Mutation("a spare trains", "grid-elastic", grids.spare_trains, 1),
    Mutation("one worker has another plan of a grid", "grid-elastic", grids.rows_exchanged, 1),
    Mutation("messages of two grids are mixed up", "grid-elastic", grids.eras_mixed_up, 3),
    Mutation("a grid begins before all have their parts", "grid-elastic", grids.begins_before_all, 1),
    Mutation("those that come stay spares", "grid-elastic", grids.never_larger, 3),
    Mutation("survivors of a grid take the last word, not the largest", "grid-elastic", newest_value_not_largest, 3),
    Mutation("a group that divides its model goes on without one", "grids-averaging", groups.others_stay, 3),
    Mutation("one of a group is believed to be there, and not the others", "grids-averaging", groups.lost_mate_believed, 3),
    Mutation("the rows of a group begin like those of different groups", "grids-averaging", groups.from_several_groups, 3),
    Mutation("a mean of groups is divided by those that there were", "grids-averaging", groups.all_are_there, 1),
    Mutation("a group that has come trains the batch before", "grids-averaging", groups.batch_of_another, 3),
    Mutation("a group that has come has no momentum", "grids-averaging", groups.newcomer_without_momentum, 3),
    Mutation("a group gets a state with averages on their way", "grids-averaging", groups.state_too_soon, 57),
    Mutation("workers that wait for others keep the run going", "grids-averaging", groups.waiting_counts, 16),
    Mutation("what a group that has come mixes is no mean", "grids-gossip", groups.no_mean, 3),
    Mutation("workers of a group evaluate different attempts together", "grids-gossip", groups.not_aligned, 17),
    Mutation("messages of a group's lost processes are believed", "grids-gossip", groups.one_generation, 100),
    Mutation("what a lost grid has left counts as trained", "grids-gossip-epoch", turns_left_out, 1),
    Mutation("what the average of a lost grid has had is trained again", "grids-averaging-epoch", averaged_turns_taken_again, 1),
    Mutation("what one part of a model contains counts for all of it", "grids-gossip-epoch", groups.best_part_counts, 1),
    Mutation("a batch that counts in some rows is not trained again", "grids-servers", groups.one_row_counts, 10),
    Mutation("a batch that counts in one row counts there twice", "grids-servers", torn_batch_counts_twice, 10),
    Mutation("a group that has lost a worker goes on, with servers", "grids-servers", groups.others_stay, 3),
    Mutation("another batch than a lost group's is trained in its place", "grids-servers", groups.left_batch_of_another, 10),
    Mutation("a group that comes does not get the servers' values", "grids-servers", groups.newcomer_with_old_values, 4),
    Mutation("a worker that has not begun misses a change", "grids-servers", groups.change_missed, 1138),
    Mutation("workers decide one by one whether their group evaluates", "grids-servers", groups.leads_by_itself, 4),
)
