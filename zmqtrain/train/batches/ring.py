"""Batches of the sample ring (`zmqtrain.data.ring`), which samples travel along."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zmqtrain.data.background import Background
from zmqtrain.data.batch import Batch
from zmqtrain.data.blocks import Contents, TensorContents
from zmqtrain.data.ledger import Promise
from zmqtrain.data.loader import Fetch, Finish
from zmqtrain.data.partition import Since
from zmqtrain.data.ring import Ring
from zmqtrain.data.ring_loader import RingLoader
from zmqtrain.data.ring_plan import RingPlan
from zmqtrain.data.source import Source
from zmqtrain.errors import CheckpointError, UsageError
from zmqtrain.exchange.members import Members
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import PeerId
from zmqtrain.train.batches.reading import reader_of, same_samples
from zmqtrain.train.course import Course
from zmqtrain.train.shares import in_step


class RingBatches:
    """Implements `Batches` with `RingLoader`."""

    common = False

    def __init__(
        self, context: RoleContext, source: Source, samples: int, members: Members, finish: Finish, thread: Background
    ) -> None:
        self._seed = (context.topology.job.seed, same_samples(context))
        self._ring = Ring.of(samples, context.placement.groups, context.topology.compute.batch_size, self._seed[0])
        self._since = Since()
        self.samples: int | None = samples
        self.steps_per_epoch: int | None = self._ring.steps
        self.promise = Promise.of_ring(survives=members.survives)
        reader = reader_of(source)
        self._fetch, self._thread = Fetch(reader, finish), thread
        self._keep = source.transform is not None  # the transform may write to its input, so it gets a copy
        self._mean, self._recorder = in_step(context.topology), context.recorder
        self.ring = ring_loader(context, samples, members, TensorContents(reader.collated), thread)

    async def more(self, step: int) -> bool:
        return True

    def epoch(self, step: int) -> int:
        return self._since.epoch + (step - self._since.step) // self._ring.steps

    def end(self, epochs: int) -> int | None:
        return self._since.step + max(0, epochs - self._since.epoch) * self._ring.steps

    def trained(self, step: int) -> int:
        ring, since = self._ring, self._since
        laps, more = divmod(step - since.step, ring.steps)
        whole = laps * sum(map(len, ring.parts))
        return since.trained + whole + sum(ring.samples_at(since.step + slot) for slot in range(more))

    def course(self) -> Course:
        return Course(self._ring.peers, self._ring.batch_size, self._since)

    def take_course(self, course: Course, step: int, state: object) -> None:
        """With other groups or batches the ring is divided anew, so only between two laps."""
        since = course.begins
        if not course.divides_as(self.course()):
            assert self.samples is not None
            was = Ring.of(self.samples, course.groups, course.batch_size, self._seed[0])
            laps, more = divmod(step - since.step, was.steps)
            if more:
                raise CheckpointError(
                    f"the checkpoint was written within a lap of the sample ring, which is divided in another way among "
                    f"{course}: resume with these, or from a checkpoint after a lap (every {was.steps} steps since step "
                    f"{since.step})"
                )
            since = Since(step, since.epoch + laps, trained=since.trained + laps * self.samples)
        self._since, self._ring = since, replace(self._ring, since=since.step)
        self.ring.begin_at(since.step)

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: object) -> None:
        return None

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        block = await self.ring.block(step)
        self._recorder.audit("samples", step=step, ids=block.ids)

        def content() -> object:
            return TensorContents.copied(block.content) if self._keep else block.content

        return await self._thread.submit(lambda: self._fetch.finished(block.ids, content, (*self._seed, step)))

    def group_samples(self, step: int) -> float | None:
        return self.ring.group_samples(step, mean=self._mean)

    def own_group_samples(self, step: int) -> int | None:
        return int(self.ring.group_samples(step, mean=False))

    def used(self, step: int) -> None:
        self.ring.used(step)

    async def close(self, timeout_s: float) -> None:
        await self.ring.close(timeout_s)


def ring_loader(context: RoleContext, samples: int, members: Members, contents: Contents, thread: Background) -> RingLoader:
    """This worker's place on the ring that connects the workers of its position in all groups. Raises `UsageError` if there are
    too few samples."""
    topology, placement, role = context.topology, context.placement, context.role
    compute = topology.compute
    column = tuple(placement.group_members(group)[role.position] for group in range(placement.groups))
    ring = Ring.of(samples, placement.groups, compute.batch_size, topology.job.seed)
    smallest = min(len(part) for part in ring.parts) // ring.steps
    if smallest < compute.columns:
        raise UsageError(
            f"a batch of the sample ring may have only {smallest} samples, which a group divides among {compute.columns} workers: "
            "lower group_size or groups, or provide more data"
        )
    first = {peer: group[0] for group in map(placement.group_members, range(placement.groups)) for peer in group}
    if members.splits:  # groups are on the ring, whoever of them is there
        column = tuple(dict.fromkeys(first.values()))

    def source() -> PeerId | None:
        """A worker that comes later asks the one with whose state it begins, if all agree on that."""
        found = members.source((role.peer, members.own_incarnation))
        return None if found is None else found[0]

    loader = RingLoader(
        RingPlan(ring, column),
        contents,
        context.endpoint,
        name=first[role.peer] if members.splits else None,
        share=members.share if members.splits else lambda step: (compute.column_of(role.position), compute.columns),
        ask=source,
        seed=(topology.job.seed, same_samples(context)),
        survives=members.survives,
        late=members.late,
        travel=topology.data.ring == "tensors",
        thread=thread,
        timeout_s=context.timeouts.barrier_s,
        recorder=context.recorder,
    )

    def change(step: int, workers: tuple[PeerId, ...]) -> None:
        there = {first[peer] for peer in workers} if members.splits else set(workers)
        loader.change(step, tuple(peer for peer in column if peer in there))

    members.on_change(change)
    return loader
