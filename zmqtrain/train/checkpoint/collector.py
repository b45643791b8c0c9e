"""The coordinator's side of checkpoints: parts arrive from all roles, and a checkpoint exists once all are on disk.

Runs in the launcher; the roles' side is `zmqtrain.exchange.checkpoint_part`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zmqtrain.errors import CheckpointError, DamagedError, PeerLostError
from zmqtrain.exchange.checkpoint_part import (
    AS_KEPT,
    COMMITTED,
    NOTHING,
    OPEN_PART,
    RESUME,
    SAVE,
    STANDS_IN,
    WRITTEN,
    Mark,
    pack_manifest,
)
from zmqtrain.membership.journal import Journal
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.train.checkpoint.clock import CheckpointClock
from zmqtrain.train.checkpoint.folder import MODEL, Checkpoint, RunShape, find_latest, prune
from zmqtrain.train.checkpoint.incoming import IncomingCheckpoint, WrittenPart
from zmqtrain.train.checkpoint.model_file import ModelFile
from zmqtrain.train.checkpoint.weights import Weights
from zmqtrain.waiting import settle
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    from zmqtrain.topology.placement import Placement
    from zmqtrain.topology.schema import Topology

#: At most this many checkpoints may be incomplete at once (groups may be steps apart). Beyond that the second oldest is given up:
#: the oldest is the one that the slowest group reaches next, and without it none would ever complete if a group stays behind.
MOST_INCOMPLETE = 8
#: A message names at most this many missing parts.
MOST_NAMED = 4
#: Names in the ledger: what the names of parts on disk, and of roles without a part, begin with; the newest complete checkpoint and
#: those that were given up; whether the clock runs; on which grid a checkpoint is written.
PART, NOTHING_HERE, KEPT, BEGUN, GRID = "part/", "nothing/", "checkpoints", "clock", "grid/"
#: Events about a checkpoint: ``checkpoint complete`` (on disk), ``checkpoint late`` (it may still complete), ``checkpoint failed``
#: (it never will), each with its step and the reason.
OnEvent = Callable[[str, dict[str, Any]], None]


class CheckpointCollector:
    """Collects, commits and prunes checkpoints, and hands out the parts of the checkpoint from which the run resumes.

    `run` it as a task for as long as the run lasts.
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
        journal: Journal | None = None,
        others: Sequence[str] = (),
        whole_groups: bool = False,
    ) -> None:
        """
        Args:
            others: parts of workers that may come later.
            whole_groups: a group's parts belong to a checkpoint all or none.
            checkpoints: the folder for checkpoints; ``None``: none is kept, and parts are refused.
            weights: the model that a run which resumes nothing begins with.
            patience_s: how long the parts of a checkpoint may take before an event says that it is late.
            members: the workers that are present now, for runs that continue after losses; asked again after each loss.
            model: the folder in which the run's newest model is left.
            clock: says when a checkpoint is due, by time or on request.
            journal: keeps which parts are on disk. If it holds some, this collector goes on where another one was ended.

        Raises `CheckpointError` if ``resume`` was written by a run of another shape."""
        if resume is not None:
            resume.require(shape)
        self._endpoint, self._checkpoints, self._shape = endpoint, checkpoints, shape
        self._keep, self._resume, self._weights = keep, resume, weights
        self._patience_s, self._whole_groups = patience_s, whole_groups
        self._members, self._on_event = members, on_event or (lambda _kind, _values: None)
        self._expected = frozenset((*shape.parts(), *others))
        self._incoming: dict[int, IncomingCheckpoint] = {}
        self._nothing: dict[str, Mapping[str, Value]] = {}  # parts that are always empty
        self._given_up: set[int] = set()  # steps whose checkpoint will never be complete
        # (WRITTEN, step, name, *mark) and (COMMITTED, step): done, or the reason why not.
        self._ended: dict[Tag, asyncio.Future[None]] = {}
        self._lock = asyncio.Lock()  # one change to the incoming checkpoints at a time
        self._look = asyncio.Event()  # a worker was lost, or there is another deadline
        self._model, self._clock = ModelFile(endpoint, model, self._model_failed), clock
        self._tasks: asyncio.TaskGroup | None = None
        self._journal, self._newest = journal, -1  # the newest step whose checkpoint is complete
        if journal is not None:
            self._go_on(journal.ledger)
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
        journal: Journal | None = None,
    ) -> CheckpointCollector:
        """The collector of a run. ``resume``: a checkpoint's folder, or a folder that holds checkpoints or runs. ``model``: the
        folder in which the run's newest model is left."""
        fc = min(placement.fc_servers, 1)  # the first FC server keeps all layers that they have divided between them
        shape = RunShape(topology.exchange.kind, placement.groups, placement.group_size, placement.servers, fc)
        checkpoint = None if resume is None else Checkpoint(find_latest(resume))
        weights = None if checkpoint is not None else Weights.of_job(topology)
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
            clock=CheckpointClock.of(endpoint, topology, placement, journal, members),
            journal=journal,
            others=[f"worker-{spare.index}" for spare in placement.spare_workers],
            whole_groups=topology.whole_groups,
        )

    def _go_on(self, ledger: Mapping[str, Any]) -> None:
        """Take up what another collector had begun."""
        self._newest, given_up = ledger.get(KEPT, [-1, []])
        self._given_up.update(given_up)
        steps: dict[int, dict[str, WrittenPart]] = {}
        for name, value in ledger.items():
            if name.startswith(NOTHING_HERE):
                self._nothing[name.removeprefix(NOTHING_HERE)] = value
            elif name.startswith(PART):
                number, _, part = name.removeprefix(PART).partition("/")
                steps.setdefault(int(number), {})[part] = WrittenPart.from_value(value)
        for step, parts in steps.items():
            assert self._checkpoints is not None
            mark = tuple(ledger.get(f"{GRID}{step}") or ())
            self._incoming[step] = self._begin(self._checkpoints, step, self._now(), mark, parts)
            for part in parts:
                self._end((WRITTEN, step, part, *mark))

    def _begin(
        self, folder: Path, step: int, began_s: float, mark: Mark, parts: Mapping[str, WrittenPart] | None = None
    ) -> IncomingCheckpoint:
        return IncomingCheckpoint(folder, step, self._shape, began_s, parts, mark, whole_groups=self._whole_groups)

    def begin_again(self) -> None:
        """Once the workers wait for no common step any more that another process had begun to agree on: continue the clock."""
        if self._clock is not None and self._journal is not None and self._journal.ledger.get(BEGUN):
            self._clock.begin()

    def _keep_in_journal(self, changes: Mapping[str, Value]) -> None:
        if self._journal is not None:
            self._journal.write(changes, durable=True)

    def _forget_parts(self, step: int) -> None:
        """The checkpoint of ``step`` is complete, or never will be."""
        if self._journal is not None:
            parts = self._in_journal(step)
            given_up: Value = [*sorted(self._given_up)[-MOST_INCOMPLETE:]]
            self._keep_in_journal({**dict.fromkeys(parts), KEPT: [self._newest, given_up]})

    def _in_journal(self, step: int) -> list[str]:
        assert self._journal is not None
        return [name for name in self._journal.ledger if name.startswith(f"{PART}{step}/") or name == f"{GRID}{step}"]

    @property
    def first_step(self) -> int:
        """The step with which the run continues; 0 if it resumes nothing."""
        return 0 if self._resume is None else self._resume.step

    def ask(self) -> None:
        """Have a checkpoint written soon, and training go on (`CheckpointClock.ask`)."""
        if self._clock is not None:
            self._clock.ask()

    async def run(self) -> None:
        """Run until cancelled; incomplete checkpoints are then removed."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._watch(), name="watch incomplete checkpoints")
                self._look.set()
                self._tasks.create_task(self._model.run(), name="keep the model")
                if self._clock is not None:
                    self._tasks.create_task(self._clock.run(self._complete), name="time for a checkpoint")
                async for peer, tag, payload in self._subscription:
                    async with self._lock:
                        await self._take(peer, tag, payload)
        finally:
            self._tasks = None
            self._subscription.close()
            taken_over = self._journal is not None and self._journal.superseded  # then another collector goes on with the files
            for incoming in list(self._incoming.values()):
                if taken_over:
                    incoming.leave()
                else:
                    self._give_up(incoming, "the run ended before it was complete")
            for future in self._ended.values():
                if not future.done():
                    future.cancel()

    async def _take(self, peer: PeerId, tag: Tag, payload: Payload) -> None:
        match tag:
            case (_, int(step), str(name), *rest) if name in self._expected and (mark := self._mark(rest)) is not None:
                pass
            case _:
                return  # from another run; nothing waits for it
        incoming = self._incoming.get(step)
        if incoming is not None and mark > incoming.mark:  # the workers that had begun it have formed another grid since
            self._replace(incoming)
            incoming = None
        if step in self._given_up or step <= self._newest or (incoming is not None and mark < incoming.mark):
            self._end((WRITTEN, step, name, *mark))
            return
        try:
            if self._checkpoints is None:
                raise CheckpointError(f"checkpoint {step} cannot be kept: this run has no folder for checkpoints")
            if incoming is None:
                began_s = self._now()
                incoming = await asyncio.to_thread(self._begin, self._checkpoints, step, began_s, mark)
                self._incoming[step] = incoming
                if mark:
                    self._keep_in_journal({f"{GRID}{step}": [*mark]})
                self._look.set()
            written = await asyncio.to_thread(incoming.take, peer, name, payload)
            self._give_up_second()
            if written:
                if incoming.newest is not None:
                    self._keep_in_journal({f"{PART}{step}/{name}": incoming.newest.to_value()})
                await self._commit_if_complete(step)
                # The last part is acknowledged only now: its worker, and with it the run, stays until the checkpoint is complete.
                self._end((WRITTEN, step, name, *mark))
        except CheckpointError as error:
            self._end((WRITTEN, step, name, *mark), error)
            self._drop(step, error)
        except (OSError, DamagedError) as error:  # a full disk: training continues without this checkpoint
            self._end((WRITTEN, step, name, *mark))
            self._do_without(step, error)

    def _mark(self, rest: Sequence[str | int]) -> Mark | None:
        """What follows in a tag; ``None`` if it is no mark of this run's."""
        match rest:
            case []:
                return ()
            case [int(number), int(workers)] if number >= 0 and 0 < workers <= self._shape.group_size:
                return number, workers
        return None

    def _replace(self, incoming: IncomingCheckpoint) -> None:
        """Others will write the checkpoint of this step, from its beginning."""
        del self._incoming[incoming.step]
        incoming.discard()
        for name in incoming.names:
            self._end((WRITTEN, incoming.step, name, *incoming.mark))
        if self._journal is not None:
            self._keep_in_journal(dict.fromkeys(self._in_journal(incoming.step)))

    async def _watch(self) -> None:
        """Look again when a worker is lost or parts are overdue."""
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
        self._drop(incoming.step, CheckpointError(f"checkpoint {incoming.step} is abandoned: {reason}{self._missing(incoming)}"))

    def _do_without(self, step: int, error: OSError | DamagedError) -> None:
        """The checkpoint of ``step`` cannot be written, but the run can go on: those who wait for it get no error."""
        self._end((COMMITTED, step))
        why = (isinstance(error, OSError) and error.strerror) or error
        self._drop(step, CheckpointError(f"checkpoint {step} cannot be written: {why}"))

    def _drop(self, step: int, error: CheckpointError) -> None:
        """The checkpoint of ``step`` will never be complete: everything that waits for it gets ``error``."""
        incoming = self._incoming.pop(step, None)
        self._given_up.add(step)
        if incoming is not None:
            incoming.discard()
            for name in incoming.names:
                self._end((WRITTEN, step, name, *incoming.mark))
        self._forget_parts(step)
        self._end((COMMITTED, step), error)
        self._on_event("checkpoint failed", {"step": step, "reason": str(error)})

    async def _look_at(self, incoming: IncomingCheckpoint) -> None:
        try:
            await self._commit_if_complete(incoming.step)
        except OSError as error:
            self._do_without(incoming.step, error)
        there = self._there()
        if incoming.step in self._incoming and incoming.has_lost(there) and incoming.missing(self._nothing, there) == [MODEL]:
            self._give_up(incoming, "the worker that was to send the model was lost")
        if incoming.step in self._incoming and not incoming.overdue and self._now() >= incoming.began_s + self._patience_s:
            incoming.overdue = True
            reason = f"checkpoint {incoming.step} is not complete after {self._patience_s:g} s{self._missing(incoming)}"
            self._on_event("checkpoint late", {"step": incoming.step, "reason": reason})

    def _missing(self, incoming: IncomingCheckpoint) -> str:
        missing = incoming.missing(self._nothing, self._there())
        if not missing:
            return ""
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        return f"; missing: {', '.join(missing[:MOST_NAMED])}{more}"

    async def _commit_if_complete(self, step: int) -> None:
        incoming, there = self._incoming.get(step), self._there()
        if self._checkpoints is None or incoming is None or incoming.missing(self._nothing, there):
            return
        folder = await asyncio.to_thread(incoming.commit, self._nothing, there)
        del self._incoming[step]
        self._newest = max(step, self._newest)
        # Every role sends its parts in order, so no more parts of older checkpoints will arrive.
        for older in [each for each in self._incoming.values() if each.step < step]:
            self._give_up(older, f"checkpoint {step}, a later one, is already complete")
        await self._publish(step, folder)
        await asyncio.to_thread(prune, self._checkpoints, self._keep)
        self._end((COMMITTED, step))
        self._on_event("checkpoint complete", {"step": step, "seconds": self._now() - incoming.began_s, "folder": str(folder)})
        self._forget_parts(step)

    async def _publish(self, step: int, folder: Path) -> None:
        """Make the complete checkpoint's model the run's. The checkpoint exists, even if this fails."""
        try:
            await asyncio.to_thread(self._model.publish, folder)
        except OSError as error:
            self._model_failed(step, error.strerror or str(error))

    def _model_failed(self, step: int, reason: str) -> None:
        self._on_event("model failed", {"step": step, "reason": f"the model of step {step} cannot be written: {reason}"})

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _there(self) -> Callable[[int], bool]:
        members = None if self._members is None else self._members()
        return lambda rank: members is None or f"worker/{rank}" in members

    async def _complete(self, step: int) -> None:
        """Wait until the checkpoint is on disk, has failed, or is overdue: the next one may still be complete."""
        await asyncio.wait({self._future((COMMITTED, step))}, timeout=self._patience_s)

    def _future(self, key: Tag) -> asyncio.Future[None]:
        future = self._ended.get(key)
        if future is None:
            future = self._ended[key] = asyncio.get_running_loop().create_future()
        return future

    def _end(self, key: Tag, error: CheckpointError | None = None) -> None:
        settle(self._future(key), error)

    async def _on_written(self, caller: PeerId, step: int, name: str, *mark: int) -> Value:
        await asyncio.shield(self._future((WRITTEN, step, name, *mark)))
        return None

    async def _on_committed(self, caller: PeerId, step: int) -> Value:
        if step <= self._newest or step in self._given_up:
            self._end((COMMITTED, step))  # another collector had told only some
        await asyncio.shield(self._future((COMMITTED, step)))
        return step not in self._given_up

    async def _on_nothing(self, caller: PeerId, name: str, sidecar: Value) -> Value:
        if name in self._expected and isinstance(sidecar, dict):
            self._nothing[name] = sidecar
            self._keep_in_journal({f"{NOTHING_HERE}{name}": sidecar})
            self._look.set()
        return None

    async def _on_open_part(self, caller: PeerId, name: str) -> Value:
        given: Checkpoint | Weights | None = self._resume
        if self._clock is not None:
            self._clock.begin()
            self._keep_in_journal({BEGUN: True})
        if given is None and self._weights is not None:
            given = self._weights.source(name)
        if given is None:
            return None
        wanted = name
        if isinstance(given, Checkpoint) and name.startswith(AS_KEPT):
            wanted = name.removeprefix(AS_KEPT)
        elif name not in self._expected:
            raise CheckpointError(f"{caller} asks for part {name!r}, which checkpoints of this run do not have")
        elif isinstance(given, Checkpoint):
            wanted = given.counterpart(name, self._shape.group_size)
        tensors: Mapping[str, Payload] = {}
        sidecar: Mapping[str, Value] = {}
        neighbour = given.stands_in(wanted) if isinstance(given, Checkpoint) else None
        if neighbour is not None:
            sidecar = {"step": given.step, STANDS_IN: neighbour}
        else:
            tensors, sidecar = await asyncio.to_thread(given.part, wanted)
        if self._tasks is None:
            raise CheckpointError("the run is ending")
        handing = self._hand_out(caller, name, tensors, sidecar)
        try:
            self._tasks.create_task(handing)
        except RuntimeError:  # it ends because of another task's error, or has just been cancelled
            handing.close()
            raise CheckpointError("the run is ending") from None
        return given.step

    async def _hand_out(self, to: PeerId, name: str, tensors: Mapping[str, Payload], sidecar: Mapping[str, Value]) -> None:
        tag = (RESUME, name)
        try:
            sent = [await self._endpoint.send(to, tag, pack_manifest(tensors, sidecar))]
            sent += [await self._endpoint.send(to, tag, tensor) for tensor in tensors.values()]
            for message in sent:
                await message.wait_released()
        except PeerLostError:
            return  # membership reports the loss
