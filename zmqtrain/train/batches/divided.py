"""Batches that those who are there divide anew whenever the members change: with exchanges that make each step together."""

from __future__ import annotations

from typing import Any

from zmqtrain.data.background import Background
from zmqtrain.data.batch import Batch
from zmqtrain.data.division import spans_of
from zmqtrain.data.ledger import Promise
from zmqtrain.data.loader import Fetch, Finish, Loader
from zmqtrain.data.partition import Partition
from zmqtrain.data.processes import Processes
from zmqtrain.data.source import Source
from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.members import Members
from zmqtrain.membership.context import RoleContext
from zmqtrain.train.batches.base import OTHER_DATA, Counted
from zmqtrain.train.batches.reading import reader_of, same_samples


class DividedBatches(Counted):
    """Implements `Batches` with `Partition` and `zmqtrain.data.division`: all workers divide the samples of each step anew whenever
    the members change."""

    common = True

    def __init__(
        self,
        context: RoleContext,
        source: Source,
        partition: Partition,
        members: Members,
        finish: Finish,
        thread: Background,
        processes: Processes | None,
    ) -> None:
        super().__init__(partition, Promise.of_dataset(source, partition, survives=True))
        self._members = members
        self._next = 0
        self._loader = Loader(
            Fetch(reader_of(source), finish),
            lambda step: self._partition.of_spans(members.spans(step)),
            (context.topology.job.seed, same_samples(context)),
            thread,
            processes=processes,
            epoch_steps=partition.steps_per_epoch,
        )

    def epoch(self, step: int) -> int:
        spans = self._members.spans(step)
        return self._partition.place(spans[0][0] // self._partition.step_samples)[0]

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        division = self._members.division
        assert division is not None
        return await self._loader.batch(step, ahead=ahead, era=division.at(step))

    def used(self, step: int) -> None:
        self._next = step + 1

    def state_dict(self) -> dict[str, Any] | None:
        """What is left to train; ``None`` as long as that follows from the step."""
        division, step = self._members.division, self._next
        if division is None:
            return None
        left, first = division.rest(step)
        if not left and first == step * division.batch:
            return None
        return {"step": step, "first": first, "left": [list(span) for span in left]}

    def load_state_dict(self, state: object) -> None:
        match state:
            case None:
                return
            case {"step": int(step), "first": int(first), "left": [*left]}:
                self._members.begin_division(step, first, spans_of(left, CheckpointError))
            case _:
                raise CheckpointError(f"the checkpoint holds {state!r:.100} where it {OTHER_DATA}")

    async def close(self, timeout_s: float) -> None:
        await self._loader.close(timeout_s)
