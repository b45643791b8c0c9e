"""Batches of a stream: data that is read from its beginning, and whose length is not known in advance.

Without ``shard`` each worker reads the whole stream, and takes its own samples of each step, which are the same as in training with
one process. With ``shard`` it reads a part of its own. Samples that do not fill a batch at the end are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from torch.utils.data import default_collate, get_worker_info

from zmqtrain.data.background import Background
from zmqtrain.data.batch import Batch
from zmqtrain.data.draws import drawn_from
from zmqtrain.data.loader import Finish
from zmqtrain.data.processes import LoaderProcesses, Processes
from zmqtrain.data.source import Source
from zmqtrain.data.state import pack_state, unpack_state
from zmqtrain.errors import CheckpointError, TaskError


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """Which samples of a stream belong to a worker."""

    rank: int
    """The worker's number among those with different samples."""
    world: int
    start: int
    stop: int
    """The slice of a step's samples that belongs to the worker."""
    step_samples: int
    """The number of samples in a step, over all groups."""


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request for the next samples of an epoch."""

    step: int
    """The number of the request in the epoch."""
    epoch: int
    wanted: bool = True
    """Whether the samples are wanted as a batch, and not only skipped on the way to one."""
    skip: bool = False
    """Read nothing: the stream's own state is already beyond these samples."""
    state: bytes | None = None
    """A state of the stream to begin with, instead of its beginning."""

    def same(self, other: StreamRequest) -> bool:
        return (self.step, self.epoch, self.wanted) == (other.step, other.epoch, other.wanted)


@dataclass(frozen=True, slots=True)
class StreamRead:
    """The result of one request to the stream."""

    content: Any = None
    """The batch, collated and transformed; ``None`` if the stream ended before the batch was full, or the batch was not wanted."""
    ended: bool = False
    reader: int = 0
    """The number of the loader process that read it."""
    state: bytes | None = None
    """The stream's own state after these samples."""


class StreamReader:
    """Reads requests in order. Runs in the loader's thread, or in each of its processes."""

    def __init__(self, source: Source, place: StreamPlace, seed: int) -> None:
        self.dataset = source.dataset
        self._source, self._place, self._seed = source, place, seed
        self._iterator: Iterator[Any] | None = None
        self._part: Any = None
        self._epoch = -1
        self._ended = False

    def __call__(self, request: StreamRequest) -> StreamRead:
        """Returns what was read. Raises `TaskError` if the stream, collate or transform raises."""
        info = get_worker_info()
        reader = 0 if info is None else info.id
        if request.skip:
            return StreamRead(reader=reader)
        try:
            return self._read(request, reader)
        except (TaskError, CheckpointError):
            raise
        except Exception as error:
            raise TaskError(
                f"reading {self._source.name}, a stream, raised {type(error).__name__} in its batch {request.step}: {error}"
            ) from error

    def _read(self, request: StreamRequest, reader: int) -> StreamRead:
        place, apart = self._place, self._source.shard is not None
        # All that read the same stream draw the same numbers, or it would not be the same; a worker's own part has draws of its
        # own.
        own = (self._seed, place.rank, reader, request.epoch, request.step)
        alike = own if apart else (self._seed, request.epoch, request.step)
        if self._iterator is None or self._epoch != request.epoch:
            with drawn_from(alike):
                self._begin(request)
        if self._ended:
            return StreamRead(ended=True, reader=reader)
        assert self._iterator is not None
        total = place.stop - place.start if apart else place.step_samples
        first, last = (0, total) if apart else (place.start, place.stop)
        samples, count = [], 0
        with drawn_from(alike):
            for sample in islice(self._iterator, total):
                if first <= count < last:
                    samples.append(sample)
                count += 1
        self._ended = count < total
        if self._ended:
            return StreamRead(ended=True, reader=reader)
        content = None
        if request.wanted:
            with drawn_from((*own, 1)):
                content = (self._source.collate or default_collate)(samples)
                if self._source.transform is not None:
                    content = self._source.transform(content)
        return StreamRead(content, False, reader, self._state())

    def _begin(self, request: StreamRequest) -> None:
        if self._part is None:
            shard, place = self._source.shard, self._place
            self._part = self.dataset if shard is None else shard(self.dataset, place.rank, place.world)
        if callable(getattr(self._part, "set_epoch", None)):
            self._part.set_epoch(request.epoch)
        state = None if request.state is None else unpack_state(request.state)
        own = hasattr(self._part, "load_state_dict")
        if state is not None and own:
            self._part.load_state_dict(state)
        self._iterator = iter(self._part)
        if state is not None and not own:
            iterator: Any = self._iterator
            iterator.load_state_dict(state)
        self._epoch, self._ended = request.epoch, False

    def _state(self) -> bytes | None:
        holder: Any
        for holder in (self._part, self._iterator):
            if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
                return pack_state(holder.state_dict())
        return None


_COUNTS = ("epoch", "requests", "batches", "readers")
#: A limit on numbers in a checkpoint, beyond any possible stream.
_MOST = 1 << 53


@dataclass(slots=True)
class Position:
    """How far a worker has got in its stream; part of checkpoints."""

    epoch: int = 0
    requests: int = 0
    """Requests of this epoch that were taken or skipped."""
    batches: int = 0
    """Batches that those requests have given."""
    readers: int = 1
    """The number of the worker's processes that read in turn."""
    states: dict[int, bytes] = field(default_factory=dict)
    """The stream's own states, by the process that has read it."""

    def to_dict(self) -> dict[str, Any]:
        """The position as plain values."""
        states = {str(reader): state for reader, state in self.states.items()}
        return {**dict(zip(_COUNTS, self._counts(), strict=True)), "states": states}

    def _counts(self) -> tuple[int, ...]:
        return self.epoch, self.requests, self.batches, self.readers

    @classmethod
    def of(cls, values: object) -> Position:
        """The position from ``values``. Raises `CheckpointError` for anything that `to_dict` cannot return."""
        if isinstance(values, Mapping) and isinstance(states := values.get("states"), Mapping):
            counts = [values.get(name) for name in _COUNTS]
            whole = [count for count in counts if type(count) is int and 0 <= count < _MOST]
            if whole == counts and all(str(key).isdecimal() and isinstance(state, bytes) for key, state in states.items()):
                kept = {int(key): state for key, state in states.items()}
                return cls(**dict(zip(_COUNTS, whole, strict=True)), states=kept)
        raise CheckpointError(
            "the checkpoint does not say how far the run was in its stream of data: it was written with other data, or is damaged. "
            "Start without --resume, or use another checkpoint"
        )


class StreamLoader:
    """A worker's batches of a stream, in order; the next one is read while this one is computed."""

    def __init__(
        self, source: Source, place: StreamPlace, seed: int, thread: Background, finish: Finish, processes: Processes | None
    ) -> None:
        """``thread`` is closed with the loader. ``processes``: processes that read for it."""
        self._readers = processes.num_workers if processes is not None else 1
        self.position = Position(readers=self._readers)
        """The position after the batch that was taken last."""
        self._place, self._thread, self._finish = place, thread, finish
        self._reader = StreamReader(source, place, seed)
        self._renews = processes is not None and not processes.persistent_workers
        self._processes = None if processes is None else LoaderProcesses(self._reader, self._request, processes)
        self._resumed = Position()
        self._held: asyncio.Future[tuple[Batch | None, Position]] | None = None

    def resume(self, position: Position) -> None:
        """Continue from ``position``; call it before the first batch. A stream without a state of its own is read again up to
        there.

        Raises `CheckpointError` if the batches would not be the same."""
        if position.readers != self._readers:
            raise CheckpointError(
                f"the checkpoint's run read its stream with num_workers = {position.readers} (or 0 for 1), but this run has "
                f"{self._readers}, which gives other data: restore the old value, or start without --resume"
            )
        self.position = position
        # If not all of its processes had reached a batch, all read from the beginning.
        known = len(position.states) == min(self._readers, position.requests)
        self._resumed = position if known else replace(position, states={})

    @property
    def skips(self) -> int:
        """The number of batches that are read again and skipped on the way to the old position."""
        return 0 if self._resumed.states else self._resumed.batches

    async def available(self) -> bool:
        """Whether the epoch has another batch."""
        if self._held is None:
            self._held = self._thread.submit(lambda: self._next(self.position))
        batch, _ = await asyncio.shield(self._held)
        return batch is not None

    async def take(self, *, ahead: bool) -> Batch:
        """The next batch. ``ahead``: start to read the one after it."""
        assert self._held is not None
        batch, self.position = await self._held
        assert batch is not None
        position = self.position
        self._held = self._thread.submit(lambda: self._next(position)) if ahead else None
        return batch

    async def next_epoch(self) -> None:
        """Start the stream again from its beginning."""
        if self._held is not None:
            await asyncio.wait({self._held})
        if self._processes is not None and self._renews:
            await self._thread.submit(self._processes.renew)
        self._held = None
        self.position = Position(self.position.epoch + 1, readers=self._readers)
        self._resumed = Position()

    async def close(self, timeout_s: float) -> None:
        if self._held is not None:
            self._held.cancel()
        if self._processes is not None:
            self._thread.submit(self._processes.renew)
        await self._thread.close(timeout_s)

    # In the reading thread.

    def _next(self, behind: Position) -> tuple[Batch | None, Position]:
        """The next batch after a position, and the position after that batch."""
        number, states, ends = self._first(behind), dict(behind.states), 0
        while True:
            request = self._request(number)
            read = self._reader(request) if self._processes is None else self._processes.take(request)
            number += 1
            if read.ended:
                ends += 1
                if ends == self._readers:
                    return None, behind
                continue
            ends = 0
            if read.state is not None:
                states[read.reader] = read.state
            if request.wanted and not request.skip:
                samples = self._place.stop - self._place.start
                return self._finish(read.content, samples), replace(
                    behind, requests=number, batches=behind.batches + 1, states=states
                )

    def _first(self, behind: Position) -> int:
        """The number of the first request after a position."""
        resumed = self._resumed
        if behind is not self.position or not resumed.requests or behind.requests != resumed.requests:
            return behind.requests
        # Requests go to the processes in turn, so the first one must be for the first process.
        return resumed.requests - resumed.requests % self._readers if resumed.states else 0

    def _request(self, number: int) -> StreamRequest:
        epoch, resumed = self.position.epoch, self._resumed
        if number >= resumed.requests + (self._readers if resumed.states else 0):
            return StreamRequest(number, epoch)
        state = resumed.states.get(number % self._readers)
        wanted = number >= resumed.requests
        return StreamRequest(number, epoch, wanted, skip=not wanted and state is not None, state=state)
