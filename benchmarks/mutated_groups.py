"""Deliberate faults in how groups on grids of several rows are lost and come back as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import zmqtrain.exchange.elastic as elastic
import zmqtrain.exchange.turns as turns
import zmqtrain.train.worker as worker
from benchmarks.patches import Patches
from zmqtrain.exchange.averaging.exchange import AveragingExchange
from zmqtrain.exchange.averaging.methods import copy_of
from zmqtrain.exchange.elastic import ElasticMembers
from zmqtrain.exchange.gossip.exchange import GossipExchange
from zmqtrain.exchange.model_server import ModelServerExchange
from zmqtrain.exchange.state_source import NeighboursState, StateSource
from zmqtrain.exchange.turns import Takers
from zmqtrain.membership.client import Membership
from zmqtrain.membership.roster import Roster
from zmqtrain.server.aggregator import Aggregator
from zmqtrain.train.batches.slotted import SlottedBatches
from zmqtrain.train.participant import Participant


def others_stay(patches: Patches) -> None:
    """A worker is lost, and the others of its group are not."""
    patches.around(Roster, "_remove", lambda _: Roster._remove_one)


def waiting_counts(patches: Patches) -> None:
    """Workers that wait for others of their group keep the run going, when no group is left that has the model."""

    def mutated(self: Roster) -> bool:
        return any(other.here for other in self._members.of_kind("worker"))

    patches.around(Roster, "_some_left", lambda left: lambda self: left(self) or mutated(self))


def one_generation(patches: Patches) -> None:
    """What a group does together has the same names as what its lost processes did."""

    def make(wait: Any) -> Any:
        async def mutated(*args: Any) -> str:
            await wait(*args)
            return ""

        return mutated

    patches.around(worker, "_wait_for_group", make)


def not_aligned(patches: Patches) -> None:
    """The workers of a group evaluate, or gather the model, without knowing that all have come so far."""

    async def mutated(_self: Any, _name: str, _group: Any) -> None:
        return None

    patches.around(ElasticMembers, "aligned", lambda _: mutated)


def from_several_groups(patches: Patches) -> None:
    """The rows of a group begin with those of different groups, whose models differ."""

    def make(find: Any) -> Any:
        def mutated(self: ElasticMembers, living: Mapping[str, int], before: Any) -> Any:
            found = find(self, living, before)
            for coming, (source, _) in list(found.items()):
                last = next(group for group in self._whole if coming[0] in group)[-1] == coming[0]
                there = [group for group in self._whole if source not in group and coming[0] not in group]
                there = [group for group in there if all(peer in living and (peer, living[peer]) not in found for peer in group)]
                if last and there:
                    position = next(group.index(coming[0]) for group in self._whole if coming[0] in group)
                    found[coming] = (there[0][position], living[there[0][position]])
            return found

        return mutated

    patches.around(ElasticMembers, "_find_sources", make)


def all_are_there(patches: Patches) -> None:
    """An average is over the places of all groups with which the run began."""

    def make(travel: Any) -> Any:
        async def mutated(self: AveragingExchange, column: Any, index: int, mean: Any, step: int) -> None:
            await travel(self, column, index, mean, step)
            mean.scale_(column.size / self._groups.column.size)

        return mutated

    patches.around(AveragingExchange, "_travel", make)


def batch_of_another(patches: Patches) -> None:
    """A group that has come back trains the batches of the step before."""

    def make(place: Any) -> Any:
        def mutated(self: SlottedBatches, step: int) -> tuple[int, int]:
            group, of = place(self, step)
            return group, max(0, of - 1) if self._members.late else of

        return mutated

    patches.around(SlottedBatches, "_place", make)


def best_part_counts(patches: Patches) -> None:
    """What has come in one part of a group's model counts as if it were in all of it."""

    def make(what_is_left: Any) -> Any:
        async def mutated(self: ElasticMembers, *args: Any) -> Any:
            whole, self._whole = self._whole, []
            try:
                return await what_is_left(self, *args)
            finally:
                self._whole = whole

        return mutated

    patches.around(ElasticMembers, "_what_is_left", make)


def smaller_group_is_another(patches: Patches) -> None:
    """A group that has lost one of its workers counts as lost, and what is left of it as another one."""

    def make(here: Any) -> Any:
        def mutated(self: Takers, living: Any, there: Any, version: int) -> Any:
            return here(self, living, [peer for peer in there if set(self.group(peer)) <= set(there)], version)

        return mutated

    patches.around(Takers, "here", make)


def next_group_is_the_same(patches: Patches) -> None:
    """A group that has come back goes on in the place of the one that was lost."""

    def mutated(before: Any, here: Any) -> Any:
        known = dict(before)
        return [(name, known.get(name, number)) for name, number in here]

    for module in (elastic, turns):
        patches.around(module, "lives_after", lambda _: mutated)


def state_too_soon(patches: Patches) -> None:
    """A group that comes gets the state as it is before averages that are on their way have arrived."""

    async def nothing() -> None:
        return None

    def make(answer: Any) -> Any:
        async def mutated(self: StateSource, step: int, members: Any, replica: Any, _settle: Any, *rest: Any) -> None:
            await answer(self, step, members, replica, nothing, *rest)

        return mutated

    patches.around(StateSource, "answer", make)


def newcomer_without_momentum(patches: Patches) -> None:
    """A group that comes begins with an optimizer that remembers nothing."""

    def make(take: Any) -> Any:
        async def mutated(self: NeighboursState, replica: Any, *args: Any) -> None:
            await take(self, replica, *args)
            replica.optimizer.state.clear()

        return mutated

    patches.around(NeighboursState, "take", make)


def no_mean(patches: Patches) -> None:
    """What a worker that has come later mixes of the first bucket is more than the mean."""

    def make(trade: Any) -> Any:
        async def mutated(self: GossipExchange, index: int, part: Any, span: Any, step: int, partners: Any, distance: Any) -> None:
            await trade(self, index, part, span, step, partners, distance)
            if not index and self._members.late:
                part.scale_(1.5)

        return mutated

    patches.around(GossipExchange, "_trade", make)


def leads_by_itself(patches: Patches) -> None:
    """Each worker of a group decides by itself whether the group evaluates."""

    async def mutated(self: Participant, step: int, _what: str) -> bool:
        before = max(0, step - 1)
        first = next((peer for peer in self.members.at(before) if self.members.there(peer, before)), None)
        return first in self.own.members

    patches.around(Participant, "leads", lambda _: mutated)


def change_missed(patches: Patches) -> None:
    """A change of the members is not prepared by a worker whose exchange has not started."""

    def make(init: Any) -> Any:
        def mutated(self: ElasticMembers, *args: Any, prepares: bool, **settings: Any) -> None:
            init(self, *args, **settings)

        return mutated

    def before_change(self: ElasticMembers, prepare: Any) -> None:
        self._prepare = asyncio.get_running_loop().create_future()
        self._prepare.set_result(prepare)

    patches.around(ElasticMembers, "__init__", make)
    patches.around(ElasticMembers, "before_change", lambda _: before_change)


def newcomer_with_old_values(patches: Patches) -> None:
    """A group that comes gets what pieces held at the beginning, as their newest values."""

    def make(read: Any) -> Any:
        async def mutated(self: ModelServerExchange) -> None:
            kept = [copy_of(bucket.parameters) for bucket in self._replica_started().buckets]
            await read(self)
            for bucket, before in zip(self._replica_started().buckets, kept, strict=True):
                bucket.parameters.copy_(before)

        return mutated

    patches.around(ModelServerExchange, "_read_entered", make)


def left_batch_of_another(patches: Patches) -> None:
    """Of what a lost group has left, another one trains the batch after it."""

    def make(place: Any) -> Any:
        def mutated(self: SlottedBatches, step: int) -> tuple[int, int]:
            slot, (group, of) = self._members.turn(step), place(self, step)
            return (group, of + 1) if slot is not None and slot.torn else (group, of)

        return mutated

    patches.around(SlottedBatches, "_place", make)


def one_row_counts(patches: Patches) -> None:
    """A batch that counts in some pieces counts in all."""

    def make(progress: Any) -> Any:
        def mutated(self: Aggregator, life: int) -> Any:
            found = progress(self, life)
            return None if found is None else (found[1], found[1])

        return mutated

    patches.around(Aggregator, "progress", make)


def lost_mate_believed(patches: Patches) -> None:
    """A worker believes views that show one of its group who is lost."""

    def make(newer: Any) -> Any:
        def mutated(self: Membership, view: Any) -> None:
            gone = {
                peer: each for peer, each in self.view.members.items() if peer not in view.members and peer.startswith("worker/")
            }
            newer(self, replace(view, members={**view.members, **dict(list(gone.items())[:1])}))

        return mutated

    patches.around(Membership, "_newer", make)
