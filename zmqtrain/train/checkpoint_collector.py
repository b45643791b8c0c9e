"""The coordinator's side of checkpoints: parts come in from all roles, and a checkpoint exists when all are on disk.

Runs in the launcher; the roles' side is `zmqtrain.exchange.checkpoint_part`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zmqtrain.errors import CheckpointError, PeerLostError
from zmqtrain.exchange.checkpoint_part import COMMITTED, OPEN_PART, RESUME, SAVE, WRITTEN, pack_manifest, unpack_manifest
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.train.checkpoint import MODEL, Checkpoint, CheckpointWriter, PartWriter, RunShape, find_latest, prune
from zmqtrain.train.checkpoint_clock import CheckpointClock
from zmqtrain.train.model_file import ModelFile
from zmqtrain.train.weights import Weights
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    from zmqtrain.topology.placement import Placement
    from zmqtrain.topology.schema import Topology

#: Checkpoints of so many steps may be incomplete at once (groups run apart). Beyond that the second is given up: the oldest is the
#: one that the slowest group comes to next, and without it none would ever be complete where a group stays behind.
MOST_INCOMPLETE = 8


class _Incoming:
    """A checkpoint whose parts are arriving."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self.writer = writer
        self.parts: dict[str, PartWriter] = {}
        self.written: set[str] = set()

    def discard(self) -> None:
        for part in self.parts.values():
            part.discard()
        self.writer.discard()


class CheckpointCollector:
    """Collects, commits and prunes checkpoints, and hands out the parts of the one that the run resumes.

    ``run()`` it as a task for as long as the run lasts.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        checkpoints: Path,
        shape: RunShape,
        *,
        keep: int = 2,
        resume: Checkpoint | None = None,
        weights: Weights | None = None,
        on_commit: Callable[[int, Path], None] | None = None,
        model: Path | None = None,
        clock: CheckpointClock | None = None,
    ) -> None:
        """``weights``: where the model begins that resumes nothing. ``on_commit(step, folder)`` is called for each complete
        checkpoint. ``model``: the folder in which the run's newest model is left. ``clock``: says when it is time for a checkpoint.
        Raises `CheckpointError` where ``resume`` is of
        another shape."""
        if resume is not None:
            resume.require(shape)
        self._endpoint, self._checkpoints, self._shape = endpoint, checkpoints, shape
        self._keep, self._resume, self._weights, self._on_commit = keep, resume, weights, on_commit
        self._expected = frozenset(shape.parts())
        self._incoming: dict[int, _Incoming] = {}
        self._given_up: set[int] = set()  # steps of which no complete checkpoint will come
        self._ended: dict[Tag, asyncio.Future[None]] = {}  # (WRITTEN, step, name) and (COMMITTED, step): done, or why not
        self._model, self._clock = ModelFile(endpoint, model), clock
        self._tasks: asyncio.TaskGroup | None = None
        self._subscription = endpoint.subscribe(SAVE)
        endpoint.serve(WRITTEN, self._on_written)
        endpoint.serve(COMMITTED, self._on_committed)
        endpoint.serve(OPEN_PART, self._on_open_part)

    @classmethod
    def of(
        cls,
        endpoint: Endpoint,
        checkpoints: Path,
        topology: Topology,
        placement: Placement,
        *,
        resume: Path | None = None,
        model: Path | None = None,
    ) -> CheckpointCollector:
        """The collector of a run. ``resume``: a checkpoint's folder, or one with checkpoints or runs in it. ``model``: the folder
        in which the run's newest model is left."""
        fc = min(placement.fc_servers, 1)  # the first one keeps the whole of what they have divided
        shape = RunShape(topology.exchange.kind, placement.groups, placement.group_size, placement.servers, fc)
        checkpoint = None if resume is None else Checkpoint(find_latest(resume))
        given = topology.job.weights
        weights = None if given is None or checkpoint is not None else Weights.of(Path(given))
        return cls(
            endpoint,
            checkpoints,
            shape,
            keep=topology.job.keep_checkpoints,
            resume=checkpoint,
            weights=weights,
            model=model,
            clock=CheckpointClock.of(endpoint, topology, placement),
        )

    async def run(self) -> None:
        """Until cancelled. Incomplete checkpoints are removed then."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._model.run(), name="keep the model")
                if self._clock is not None:
                    self._tasks.create_task(self._clock.run(self._complete), name="time for a checkpoint")
                async for peer, tag, payload in self._subscription:
                    await self._take(peer, tag, payload)
        finally:
            self._tasks = None
            self._subscription.close()
            for incoming in self._incoming.values():
                incoming.discard()
            for future in self._ended.values():
                if not future.done():
                    future.cancel()

    async def _take(self, peer: PeerId, tag: Tag, payload: Payload) -> None:
        match tag:
            case (_, int(step), str(name)) if name in self._expected:
                pass
            case _:
                return  # not of this run; nobody waits for it
        if step in self._given_up:
            self._end((WRITTEN, step, name))
            return
        try:
            await asyncio.to_thread(self._write, step, name, payload)
            self._give_up_second()
            if step in self._incoming and name in self._incoming[step].written:
                if self._incoming[step].written == self._expected:
                    await self._commit(step)
                # Of the last part only now: its worker stays until the checkpoint is complete, and with it the run.
                self._end((WRITTEN, step, name))
        except (CheckpointError, OSError) as error:
            said = error if isinstance(error, CheckpointError) else CheckpointError(f"checkpoint {step} cannot be written: {error}")
            self._end((WRITTEN, step, name), said)
            self._end((COMMITTED, step), said)

    def _write(self, step: int, name: str, payload: Payload) -> None:
        """In a thread; one call at a time."""
        incoming = self._incoming.get(step)
        if incoming is None:
            incoming = self._incoming[step] = _Incoming(CheckpointWriter(self._checkpoints, step, self._shape))
        if name in incoming.written:
            raise CheckpointError(f"part {name} of checkpoint {step} came twice")
        part = incoming.parts.get(name)
        if part is None:
            part = incoming.parts[name] = incoming.writer.part(name, *unpack_manifest(payload))
        else:
            part.write(payload.frames(), payload.dtype, payload.numel)
        if part.complete:
            incoming.writer.add(part.close())
            incoming.written.add(name)

    def _give_up_second(self) -> None:
        while len(self._incoming) > MOST_INCOMPLETE:
            step = sorted(self._incoming)[1]
            incoming = self._incoming.pop(step)
            incoming.discard()
            self._given_up.add(step)
            for name in incoming.parts:
                self._end((WRITTEN, step, name))
            self._end((COMMITTED, step), CheckpointError(f"checkpoint {step} is given up: some groups are too far ahead of others"))

    async def _commit(self, step: int) -> None:
        incoming = self._incoming.pop(step)
        folder = await asyncio.to_thread(incoming.writer.commit)
        await asyncio.to_thread(self._model.publish, folder)
        await asyncio.to_thread(prune, self._checkpoints, self._keep)
        self._end((COMMITTED, step))
        if self._on_commit is not None:
            self._on_commit(step, folder)

    async def _complete(self, step: int) -> None:
        """Wait until the checkpoint is on disk, or will never be."""
        await asyncio.wait({self._future((COMMITTED, step))})

    def _future(self, key: Tag) -> asyncio.Future[None]:
        future = self._ended.get(key)
        if future is None:
            future = self._ended[key] = asyncio.get_running_loop().create_future()
        return future

    def _end(self, key: Tag, error: CheckpointError | None = None) -> None:
        future = self._future(key)
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # it may be that nobody asks

    async def _on_written(self, caller: PeerId, step: int, name: str) -> Value:
        await asyncio.shield(self._future((WRITTEN, step, name)))
        return None

    async def _on_committed(self, caller: PeerId, step: int) -> Value:
        await asyncio.shield(self._future((COMMITTED, step)))
        return None

    async def _on_open_part(self, caller: PeerId, name: str) -> Value:
        given: Checkpoint | Weights | None = self._resume
        if self._clock is not None:
            self._clock.begin()
        if given is None and name == MODEL:
            given = self._weights
        if given is None:
            return None
        if name not in self._expected:
            raise CheckpointError(f"{caller} asks for part {name!r}, which checkpoints of this run do not have")
        tensors, sidecar = await asyncio.to_thread(given.part, name)
        if self._tasks is None:
            raise CheckpointError("the run is ending")
        self._tasks.create_task(self._hand_out(caller, name, tensors, sidecar))
        return given.step

    async def _hand_out(self, to: PeerId, name: str, tensors: Mapping[str, Payload], sidecar: Mapping[str, Value]) -> None:
        tag = (RESUME, name)
        try:
            sent = [await self._endpoint.send(to, tag, pack_manifest(tensors, sidecar))]
            sent += [await self._endpoint.send(to, tag, tensor) for tensor in tensors.values()]
            for message in sent:
                await message.wait_released()
        except PeerLostError:
            return  # membership tells the run
