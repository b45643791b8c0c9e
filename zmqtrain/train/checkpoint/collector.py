"""The coordinator's side of checkpoints: parts come in from all roles, and a checkpoint exists when all are on disk.

Runs in the launcher; the roles' side is `zmqtrain.exchange.checkpoint_part`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zmqtrain.errors import CheckpointError, PeerLostError
from zmqtrain.exchange.checkpoint_part import COMMITTED, NOTHING, OPEN_PART, RESUME, SAVE, STANDS_IN, WRITTEN, pack_manifest
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.train.checkpoint.clock import CheckpointClock
from zmqtrain.train.checkpoint.folder import MODEL, Checkpoint, RunShape, find_latest, prune
from zmqtrain.train.checkpoint.incoming import IncomingCheckpoint
from zmqtrain.train.checkpoint.model_file import ModelFile
from zmqtrain.train.checkpoint.weights import Weights
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    from zmqtrain.topology.placement import Placement
    from zmqtrain.topology.schema import Topology

#: Checkpoints of so many steps may be incomplete at once (groups run apart). Beyond that the second is given up: the oldest is the
#: one that the slowest group comes to next, and without it none would ever be complete where a group stays behind.
MOST_INCOMPLETE = 8
#: Of what is missing so many parts are named.
MOST_NAMED = 4
#: What is told of a checkpoint: ``checkpoint complete`` (on disk), ``checkpoint late`` (it may be complete still), ``checkpoint
#: failed`` (it never will be), with its step, and the reason.
OnEvent = Callable[[str, dict[str, Any]], None]


class CheckpointCollector:
    """Collects, commits and prunes checkpoints, and hands out the parts of the one that the run resumes.

    ``run()`` it as a task for as long as the run lasts.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        checkpoints: Path | None,
        shape: RunShape,
        *,
        keep: int = 2,
        resume: Checkpoint | None = None,
        weights: Weights | None = None,
        patience_s: float = 600.0,
        members: Callable[[], Collection[PeerId]] | None = None,
        on_event: OnEvent | None = None,
        model: Path | None = None,
        clock: CheckpointClock | None = None,
    ) -> None:
        """``checkpoints``: the folder for them; ``None``: none is kept, and parts are refused. ``weights``: where the model begins
        that resumes nothing. ``patience_s``: how long the parts of a checkpoint may take
        until somebody is told. ``members``: who is there now, for runs that go on without those who are not; it is asked again
        whenever one is lost. ``model``: the folder in which the run's newest model is left. ``clock``: says when it is time for a
        checkpoint. Raises `CheckpointError` where ``resume`` is of another shape."""
        if resume is not None:
            resume.require(shape)
        self._endpoint, self._checkpoints, self._shape = endpoint, checkpoints, shape
        self._keep, self._resume, self._weights = keep, resume, weights
        self._patience_s = patience_s
        self._members, self._on_event = members, on_event or (lambda _kind, _values: None)
        self._expected = frozenset(shape.parts())
        self._incoming: dict[int, IncomingCheckpoint] = {}
        self._nothing: dict[str, Mapping[str, Value]] = {}  # parts that are always empty
        self._given_up: set[int] = set()  # steps of which no complete checkpoint will come
        self._ended: dict[Tag, asyncio.Future[None]] = {}  # (WRITTEN, step, name) and (COMMITTED, step): done, or why not
        self._lock = asyncio.Lock()  # one change of what is incoming at a time
        self._look = asyncio.Event()  # somebody was lost, or there is another deadline
        self._model, self._clock = ModelFile(endpoint, model), clock
        self._tasks: asyncio.TaskGroup | None = None
        self._subscription = endpoint.subscribe(SAVE)
        endpoint.serve(WRITTEN, self._on_written)
        endpoint.serve(COMMITTED, self._on_committed)
        endpoint.serve(OPEN_PART, self._on_open_part)
        endpoint.serve(NOTHING, self._on_nothing)
        endpoint.on_lost(lambda _peer, _reason: self._look.set())

    @classmethod
    def of(
        cls,
        endpoint: Endpoint,
        checkpoints: Path | None,
        topology: Topology,
        placement: Placement,
        *,
        resume: Path | None = None,
        members: Callable[[], Collection[PeerId]] | None = None,
        on_event: OnEvent | None = None,
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
            patience_s=topology.job.timeouts.barrier_s,
            members=members,
            on_event=on_event,
            model=model,
            clock=CheckpointClock.of(endpoint, topology, placement),
        )

    @property
    def first_step(self) -> int:
        """The step that the run goes on with: 0 where it resumes nothing."""
        return 0 if self._resume is None else self._resume.step

    async def run(self) -> None:
        """Until cancelled. Incomplete checkpoints are removed then."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._watch(), name="watch incomplete checkpoints")
                self._tasks.create_task(self._model.run(), name="keep the model")
                if self._clock is not None:
                    self._tasks.create_task(self._clock.run(self._complete), name="time for a checkpoint")
                async for peer, tag, payload in self._subscription:
                    async with self._lock:
                        await self._take(peer, tag, payload)
        finally:
            self._tasks = None
            self._subscription.close()
            for incoming in list(self._incoming.values()):
                self._give_up(incoming, "the run ended before it was complete")
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
            if self._checkpoints is None:
                raise CheckpointError(f"checkpoint {step} cannot be kept: this run has no folder for checkpoints")
            incoming = self._incoming.get(step)
            if incoming is None:
                incoming = await asyncio.to_thread(IncomingCheckpoint, self._checkpoints, step, self._shape, self._now())
                self._incoming[step] = incoming
                self._look.set()
            written = await asyncio.to_thread(incoming.take, peer, name, payload)
            self._give_up_second()
            if written:
                await self._commit_if_complete(step)
                # Of the last part only now: its worker stays until the checkpoint is complete, and with it the run.
                self._end((WRITTEN, step, name))
        except (CheckpointError, OSError) as error:
            said = error if isinstance(error, CheckpointError) else CheckpointError(f"checkpoint {step} cannot be written: {error}")
            self._end((WRITTEN, step, name), said)
            self._drop(step, said)

    async def _watch(self) -> None:
        """Look again where somebody was lost, and where parts are overdue."""
        while True:
            due = [incoming.began_s + self._patience_s for incoming in self._incoming.values() if not incoming.overdue]
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(due, default=None)):
                    await self._look.wait()
            self._look.clear()
            async with self._lock:
                for incoming in list(self._incoming.values()):
                    await self._look_at(incoming)

    def _give_up_second(self) -> None:
        while len(self._incoming) > MOST_INCOMPLETE:
            self._give_up(self._incoming[sorted(self._incoming)[1]], "some groups are too far ahead of others")

    def _give_up(self, incoming: IncomingCheckpoint, reason: str) -> None:
        self._drop(incoming.step, CheckpointError(f"checkpoint {incoming.step} is given up: {reason}{self._missing(incoming)}"))

    def _drop(self, step: int, error: CheckpointError) -> None:
        """This one will never be complete. Nobody is held up by it."""
        incoming = self._incoming.pop(step, None)
        self._given_up.add(step)
        if incoming is not None:
            incoming.discard()
            for name in incoming.names:
                self._end((WRITTEN, step, name))
        self._end((COMMITTED, step), error)
        self._on_event("checkpoint failed", {"step": step, "reason": str(error)})

    async def _look_at(self, incoming: IncomingCheckpoint) -> None:
        try:
            await self._commit_if_complete(incoming.step)
        except OSError as error:
            self._drop(incoming.step, CheckpointError(f"checkpoint {incoming.step} cannot be written: {error}"))
        there = self._there()
        if incoming.step in self._incoming and incoming.has_lost(there) and incoming.missing(self._nothing, there) == [MODEL]:
            self._give_up(incoming, "who was to send the model was lost")
        if incoming.step in self._incoming and not incoming.overdue and self._now() >= incoming.began_s + self._patience_s:
            incoming.overdue = True
            reason = f"checkpoint {incoming.step} is not complete after {self._patience_s:g} s{self._missing(incoming)}"
            self._on_event("checkpoint late", {"step": incoming.step, "reason": reason})

    def _missing(self, incoming: IncomingCheckpoint) -> str:
        missing = incoming.missing(self._nothing, self._there())
        if not missing:
            return ""
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        return f": {', '.join(missing[:MOST_NAMED])}{more} {'has' if len(missing) == 1 else 'have'} not come"

    async def _commit_if_complete(self, step: int) -> None:
        incoming, there = self._incoming.get(step), self._there()
        if self._checkpoints is None or incoming is None or incoming.missing(self._nothing, there):
            return
        folder = await asyncio.to_thread(incoming.commit, self._nothing, there)
        del self._incoming[step]
        # Everybody sends one part after the other, so of what is older nothing more will come.
        for older in [each for each in self._incoming.values() if each.step < step]:
            self._give_up(older, f"checkpoint {step} is complete, and nothing more of this one will come")
        await self._publish(step, folder)
        await asyncio.to_thread(prune, self._checkpoints, self._keep)
        self._end((COMMITTED, step))
        self._on_event("checkpoint complete", {"step": step, "seconds": self._now() - incoming.began_s, "folder": str(folder)})

    async def _publish(self, step: int, folder: Path) -> None:
        """The checkpoint is there, whatever becomes of this."""
        try:
            await asyncio.to_thread(self._model.publish, folder)
        except OSError as error:
            self._on_event("model failed", {"step": step, "reason": f"the model of step {step} cannot be written: {error}"})

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _there(self) -> Callable[[int], bool]:
        members = None if self._members is None else self._members()
        return lambda rank: members is None or f"worker/{rank}" in members

    async def _complete(self, step: int) -> None:
        """Wait until the checkpoint is on disk, or will never be, or is overdue: the next one may be complete."""
        await asyncio.wait({self._future((COMMITTED, step))}, timeout=self._patience_s)

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

    async def _on_nothing(self, caller: PeerId, name: str, sidecar: Value) -> Value:
        if name in self._expected and isinstance(sidecar, dict):
            self._nothing[name] = sidecar
            self._look.set()
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
        tensors: Mapping[str, Payload] = {}
        sidecar: Mapping[str, Value] = {}
        neighbour = given.stands_in(name) if isinstance(given, Checkpoint) else None
        if neighbour is not None:
            sidecar = {"step": given.step, STANDS_IN: neighbour}
        else:
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
