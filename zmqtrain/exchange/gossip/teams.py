"""Gossip among groups of several workers of which some may be lost while the others go on.

The workers of a group hold equal models, also if some are missing, so what a group gets from another one counts on all of them or
on none (`zmqtrain.exchange.elastic_sums.GroupSums.mix`). Those who are planned for a step divide the parts of the model, here and
at the partner's. All know these plans before the step begins, so nobody has to ask who sends what. If one of them is lost in the
meantime, what it has not sent is missing: the group stays as it is in this step, like a worker whose partner is lost. Its own parts
are sent in any case, and what comes for it is taken in, so that nobody waits for it::

    sums of the step -> update -> copies of the own parts are sent -> the partner's parts come -> the group gathers them -> the mean
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.data.teams import owner_of
from zmqtrain.errors import PeerLostError
from zmqtrain.events import Recorder
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.base import Bucket
from zmqtrain.exchange.elastic_sums import GroupSums, Mixture
from zmqtrain.exchange.gossip.contents import MixedContents
from zmqtrain.exchange.gossip.distance import Distance
from zmqtrain.exchange.members import Members
from zmqtrain.exchange.shared_copies import Like
from zmqtrain.exchange.team_parts import gather_parts
from zmqtrain.net.endpoint import Endpoint, PeerId, Sent, Tag
from zmqtrain.waiting import abandoned, in_time
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.value import ValuePayload

T = TypeVar("T")
#: A bucket, and the position in a group whose part of it is meant.
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Round:
    """What a worker needs to know about a step."""

    step: int
    team: tuple[PeerId, ...]
    """The workers of its group that are planned for the step."""
    to: tuple[PeerId, ...]
    """The workers of the group that gets this group's model."""
    sources: tuple[tuple[PeerId, ...], ...]
    """The workers of each group whose model this group gets."""
    telling: int | None
    """The bucket with whose parts groups tell each other what their models contain."""


class TeamGossip:
    """What this worker's group sends and receives. Groups are named by the first worker of each, whether that is there or not."""

    def __init__(
        self,
        endpoint: Endpoint,
        members: Members,
        sums: GroupSums,
        groups: Sequence[Sequence[PeerId]],
        *,
        weights: bool,
        like: Like,
        arithmetic: Arithmetic,
        timeout_s: float,
        recorder: Recorder,
        fail: Callable[[BaseException], None],
        contents: MixedContents | None = None,
    ) -> None:
        """``groups``: the workers of all groups. ``weights``: parameters are exchanged, not gradients. ``fail`` gets an error of
        what nobody waits for. ``contents``: what is known of the own model, if groups tell each other."""
        self._endpoint, self._members, self._sums = endpoint, members, sums
        self._groups = {group[0]: tuple(group) for group in groups}
        self.name = next(name for name, group in self._groups.items() if endpoint.peer in group)
        self._size = len(self._groups[self.name])
        self._weights, self._like, self._arithmetic = weights, like, arithmetic
        self._timeout_s, self._recorder, self._fail = timeout_s, recorder, fail
        self._contents = contents
        self._outgoing: dict[Place, Payload] = {}  # the copies that are sent
        self._giving: dict[Place, asyncio.Task[None]] = {}
        self._lent: dict[Place, Sent] = {}
        self._coming: set[asyncio.Task[Payload | None]] = set()

    def there(self, step: int) -> tuple[PeerId, ...]:
        """The groups of which somebody is planned for the step."""
        return tuple(name for name in self._groups if self._team(name, step))

    async def exchange(
        self, step: int, buckets: Sequence[Bucket], to: PeerId, sources: Sequence[PeerId], distance: Distance | None
    ) -> None:
        """Give this group's model (or gradients) to one group, and take the mean with those of others. On return all of the group
        have the same, and its own copy may be changed. ``distance`` is that from the first of the sources."""
        sent_to, comes_from = self._team(to, step), tuple(self._team(source, step) for source in sources)
        largest = max(buckets, key=lambda bucket: self._payload(bucket).numel)
        # All of a group must know the same of its model, so each gets a part of the largest bucket, if only an empty one.
        telling = None if self._contents is None else largest.index
        of = _Round(step, self._team(self.name, step), sent_to, comes_from, telling)
        for bucket in buckets:
            if self._weights:
                self._recorder.audit("combines", step=step, bucket=bucket.index, own=bucket.parameters)
            for place, start, stop in self._own_parts(of, bucket):
                await self._give(of, place, self._payload(bucket).part(start, stop))
        coming = {key: self._take_in(of, *key) for bucket in buckets for key in self._keys(of, bucket)}
        few = self._payload(largest).numel < self._size

        async def take(group: Group, bucket: Bucket, work: Payload) -> None:
            for place, start, stop in self._own_parts(of, bucket):
                part = work.part(start, stop)
                for number in range(len(of.sources)):
                    came = await self._came(of, place, number, coming[place, number])
                    if start == stop:
                        continue
                    await self._arithmetic.do(partial(part.add_ if number else part.copy_, came), part)
            tag, own = ("gossip", step, bucket.index), self._payload(bucket)
            if few and bucket is largest:  # some of the group have no part of anything, but must be there
                word = work.empty_like().part(0, 1)
                word.copy_(own.part(0, 1))
                await all_reduce(group, word, (*tag, "all"))
            await gather_parts(group, work, tag, size=self._size, priority=bucket.index)
            if distance is not None and await self._arithmetic.do(partial(distance.add, own, work), own):
                self._recorder.event("spread", step=step, distance=distance.relative(), partner=owner_of(0, of.sources[0]))

        def mean(bucket: Bucket, sum_of_others: Payload) -> None:
            own = self._payload(bucket)
            own.add_(sum_of_others)
            own.scale_(1.0 / (1 + len(of.sources)))

        def counts_here() -> None:
            if self._contents is None:
                return
            for number, source in enumerate(sources):  # none of the group has the mixture before each has its parts of this bucket
                heard = next(task for (place, of_source), task in coming.items() if place[0] == telling and of_source == number)
                came = heard.result()
                assert came is not None
                self._contents.came(self._members.unit(source, step), step, came.meta, of=1)

        needed = tuple(dict.fromkeys((*of.team, *(peer for source in of.sources for peer in source))))
        counts = bool(sources) and await self._sums.mix(step, buckets, Mixture(needed, take, mean, counts_here))
        for bucket in buckets:
            self._recorder.audit("mixed", step=step, bucket=bucket.index, sources=list(sources) if counts else [])
        if sources and not counts:
            self._recorder.event("left_out", step=step, workers=[peer for source in of.sources for peer in source])

    async def settle(self) -> None:
        """Wait until all that was given is on its way."""
        if self._giving:
            await asyncio.wait(set(self._giving.values()))

    async def stop(self) -> None:
        """Abandon what is on its way."""
        await abandoned((*self._giving.values(), *self._coming))

    def _payload(self, bucket: Bucket) -> Payload:
        return bucket.parameters if self._weights else bucket.gradients

    def _team(self, name: PeerId, step: int) -> tuple[PeerId, ...]:
        planned = self._members.at(step)
        return tuple(peer for peer in self._groups[name] if peer in planned)

    def _own_parts(self, of: _Round, bucket: Bucket) -> list[tuple[Place, int, int]]:
        """What this worker sends and receives of a bucket: for which positions, and the bounds of these parts."""
        me, tells = self._endpoint.peer, bucket.index == of.telling
        parts = enumerate(bounds(self._payload(bucket).numel, self._size))
        return [((bucket.index, n), *span) for n, span in parts if owner_of(n, of.team) == me and (tells or span[0] < span[1])]

    def _keys(self, of: _Round, bucket: Bucket) -> list[tuple[Place, int]]:
        return [(place, number) for place, _, _ in self._own_parts(of, bucket) for number in range(len(of.sources))]

    async def _give(self, of: _Round, place: Place, part: Payload) -> None:
        """Copy the part, and begin to send it to the one who gets it, if that is there."""
        if (before := self._giving.pop(place, None)) is not None:
            await asyncio.wait({before})
        if (lent := self._lent.pop(place, None)) is not None and not lent.released:
            with suppress(PeerLostError):
                await lent.wait_released()
        to = owner_of(place[1], of.to)
        if not self._members.there(to, of.step):
            return
        outgoing: Payload = ValuePayload()
        if part.numel:
            if place not in self._outgoing:
                self._outgoing[place] = self._like(part)
            outgoing = self._outgoing[place]
            await self._arithmetic.do(partial(outgoing.copy_, part), outgoing)
        if self._contents is not None and place[0] == of.telling:
            outgoing = outgoing.with_meta(self._contents.told(of.step))

        async def send() -> None:
            index, span = place[0], self._recorder.span
            with span(f"send bucket {index} to {to}", "send", step=of.step), suppress(PeerLostError):
                tag = _tag(of.step, place, self._members.own_incarnation)
                self._lent[place] = await self._endpoint.send(to, tag, outgoing, priority=index)

        self._giving[place] = self._begin(send(), f"send bucket {place[0]} of step {of.step}")

    def _take_in(self, of: _Round, place: Place, number: int) -> asyncio.Task[Payload | None]:
        """Begin to receive a part from one of the sources: to the end, whether it counts or not. Nothing, if that one is lost."""
        source = owner_of(place[1], of.sources[number])

        async def receive() -> Payload | None:
            with suppress(PeerLostError):
                if self._members.there(source, of.step):  # another process that has its name by now would never send it
                    process = self._members.incarnation(source, of.step) or 0
                    return await self._endpoint.receive(source, _tag(of.step, place, process))
            return None

        task = self._begin(receive(), f"receive bucket {place[0]} of step {of.step}")
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)
        return task

    async def _came(self, of: _Round, place: Place, number: int, task: asyncio.Task[Payload | None]) -> Payload:
        source, what = owner_of(place[1], of.sources[number]), f"bucket {place[0]} of step {of.step}"
        with self._recorder.span(f"receive bucket {place[0]} of {source}", "receive", step=of.step):
            async with in_time(source, what, self._timeout_s):
                came = await asyncio.shield(task)
        if came is None:
            raise PeerLostError(source, "it was lost in the meantime", waiting_for=what)
        return came

    def _begin(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


def _tag(step: int, place: Place, process: int) -> Tag:
    """A part of a model that is mixed at this step, of this process of the sender: an earlier one may have sent the same part, of
    another model, before it was lost."""
    return ("gossip", step, *place, process)
