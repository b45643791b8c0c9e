"""A peer's place on the sample ring.

If the samples themselves are sent around, the life of a batch is::

    batch(step)   it was read at the start (first lap), or came from the neighbour one lap after that one had used it
    used(step)    it is sent on to the next neighbour while the next step computes; a copy stays here for one lap

When the members change, all of them stop at the same step, announce what they have (copies included), and ask for what their new
parts lack: first the former holder, then the neighbours of a lost one, which have copies of its samples. A sample without a copy
(in the first lap) is read from the dataset by a member that can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from zmqtrain.data.background import Background
from zmqtrain.data.blocks import Block, Contents
from zmqtrain.data.ledger import Ledger
from zmqtrain.data.partition import Indices, even_bounds
from zmqtrain.data.ring import Ring
from zmqtrain.data.ring_plan import RingPlan
from zmqtrain.errors import ConnectivityError, PeerLostError, ProtocolError, TaskError
from zmqtrain.events import Recorder
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.waiting import abandoned, in_time
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload

_PARTS, _WANT = "ring.parts", "ring.want"
#: A copy of a sent block is kept for one lap and this many steps: by then the neighbour has received it, and has sent it on.
SLACK_STEPS = 4
#: Lower than the priority of everything else that is sent.
PRIORITY = -1
#: The number of samples in one request.
MOST_AT_ONCE = 4096


class RingLoader:
    """Gives a worker the blocks of its batches, and passes them on. All methods are called on the loop's thread."""

    def __init__(
        self,
        plan: RingPlan,
        contents: Contents,
        endpoint: Endpoint,
        *,
        name: PeerId | None = None,
        share: Callable[[int], tuple[int, int]] = lambda step: (0, 1),
        ask: Callable[[], PeerId | None] = lambda: None,
        seed: tuple[int, ...] | None = None,
        survives: bool = False,
        late: bool = False,
        travel: bool = True,
        thread: Background,
        timeout_s: float,
        recorder: Recorder,
    ) -> None:
        """
        Args:
            name: the place on the ring, by default this worker's own.
            share: this worker's part of its group's batch of a step, and the number of parts, which are even. May change only if
                samples are not sent.
            ask: whom a ``late`` worker asks for the ring; by default another one on it.
            seed: of what the dataset draws, with the step; the same for workers that have the same samples.
            survives: whether the others continue after the loss of a member.
            late: this worker joins a ring that is already running.
            travel: whether samples are sent; otherwise each batch is read from the dataset.
        """
        self._plan, self._contents, self._endpoint, self._seed = plan, contents, endpoint, seed
        self._name, self._whom, self._share = name or endpoint.peer, ask, share
        self._survives, self._late = survives, late
        self._knows = not late  # which ring is in use
        self._comes: int | None = None  # the step with which a late worker takes part
        self._meanwhile: list[tuple[int, tuple[PeerId, ...]]] = []  # changes since it has asked for that
        self._read_last: tuple[int, int] = -1, 0  # the last step, and its samples
        self._travel, self._thread, self._timeout_s, self._recorder = travel, thread, timeout_s, recorder
        self.ledger = Ledger()
        self._era: Ring | None = None
        self._reading: dict[int, asyncio.Future[Block]] = {}  # step -> the block that is being read for it
        # The next step's block, if samples are not sent: of which step, ring and share.
        self._ahead: tuple[int, Ring, tuple[int, int], asyncio.Future[Block]] | None = None
        self._blocks: dict[int, Block] = {}  # step -> its block
        self._used: dict[int, Block] = {}  # step -> its block, as a copy
        self._upto = 0  # blocks of all steps before this one have arrived
        self._changed = asyncio.Event()  # something has arrived, or never will
        self._broken: ConnectivityError | None = None  # nothing more will come from the neighbour
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._receiver: asyncio.Task[None] | None = None
        self._stock: dict[int, asyncio.Future[dict[int, tuple[Any, int]]]] = {}  # step of a change -> the samples here at that step
        endpoint.serve(_PARTS, self._on_parts)
        endpoint.serve(_WANT, self._on_want)

    def begin_at(self, step: int) -> None:
        """The first lap begins with ``step``. Call it before the first block."""
        if not self._late:  # then others say which ring it is
            self._plan.begin_at(step)

    def change(self, step: int, members: tuple[PeerId, ...]) -> None:
        """These are the members from ``step`` on (`zmqtrain.exchange.members.Members.on_change`)."""
        if self._late and self._comes is not None and step > self._comes:  # it takes part before that
            self._meanwhile.append((step, members))
        elif self._late:  # their samples are requested with the first batch
            self._comes = step
            self._meanwhile.clear()
            nothing = np.zeros(0, np.int64)
            self._plan.begin(Ring((nothing,) * len(members), 1, step), members)
        else:
            self._plan.change(step, members)
            if not self._knows:
                self._meanwhile.append((step, members))

    def group_samples(self, step: int, *, mean: bool) -> float:
        """Samples of this worker's group in a step or, with ``mean``, the average over all groups."""
        ring, members = self._plan.at(step)
        return ring.samples_at(step) / ring.peers if mean else float(len(ring.indices(step, self._place(members))))

    async def block(self, step: int) -> Block:
        """The samples of ``step``. Call `used` when they have been used. Raises `PeerLostError` and `PeerTimeoutError` that name
        the neighbour."""
        if not self._travel:
            return await self._read(step)
        ring, _ = self._plan.at(step)
        if self._late or (self._era is not None and ring is not self._era):
            await self._regroup(step)
            ring, _ = self._plan.at(step)
        elif self._era is None:
            self._begin(ring, read=True, step=step)
        if step in self._reading:
            self._blocks[step] = await self._reading.pop(step)
        with self._recorder.span("wait for samples", "wait", step=step):
            block = await self._waited(step)
        self.ledger.trained += len(block.ids)
        return block

    def used(self, step: int) -> None:
        """The samples of ``step`` are not needed here any more in this lap."""
        block = self._blocks.pop(step, None)
        ring, members = self._plan.at(step)
        if not self._travel:
            self._end_lap(ring, step)
            return
        if block is None or ring is not self._era:
            return
        self._used[step] = block
        self._used.pop(step - ring.steps - SLACK_STEPS, None)
        if len(members) > 1:
            to = members[(self._place(members) + 1) % len(members)]
            self._start(self._send(to, ("ring", ring.since, step + ring.steps), block))
        else:
            self._blocks[step + ring.steps] = block
        self.ledger.held = sum(len(each.ids) for each in self._blocks.values())
        self._end_lap(ring, step)

    def _end_lap(self, ring: Ring, step: int) -> None:
        if ring.place(step)[1] == ring.steps - 1:
            self._recorder.event("samples", step=step, **self.ledger.values())

    async def close(self, timeout_s: float) -> None:
        """Leave the ring: pending transfers are abandoned."""
        if self.ledger.trained:
            self._recorder.event("samples", step=None, **self.ledger.values())
        await abandoned([*self._tasks, *([self._receiver] if self._receiver is not None else [])])
        for future in self._stock.values():
            future.cancel()
        await self._thread.close(timeout_s)

    async def _read(self, step: int) -> Block:
        """Read samples that are not sent around from the dataset; the next step's are read in the meantime."""
        if self._late:
            self._late = False
            await self._take_parts(step)
        ring, _ = self._plan.at(step)
        ahead, self._ahead = self._ahead, None
        # It may have been read for another ring, or another share, before the change of the members was known.
        known = ahead is not None and ahead[:3] == (step, ring, self._share(step))
        block = await (ahead[3] if ahead is not None and known else self._submit(step))
        following, _ = self._plan.at(step + 1)
        self._ahead = (step + 1, following, self._share(step + 1), self._submit(step + 1))
        before, samples = self._read_last
        self.ledger.trained += len(block.ids) - (samples if before == step else 0)  # the same step again, if it was given up
        self._read_last = step, len(block.ids)
        self.ledger.held = len(self._plan.indices(step, self._name))
        return block

    def _submit(self, step: int) -> asyncio.Future[Block]:
        ring, members = self._plan.at(step)
        ids = self._own(ring, step, self._place(members))
        seed = None if self._seed is None else (*self._seed, step)
        return self._thread.submit(lambda: Block(ids, self._contents.read(ids, seed)))

    # A lap.

    def _begin(self, ring: Ring, *, read: bool, step: int) -> None:
        """Take part in ``ring`` from now on."""
        self._era, self._broken = ring, None
        _, members = self._plan.at(step)
        lap, slot = ring.place(step)
        # A run resumed in the middle of a lap has already been sent the first batches of the next lap: these are read, too.
        self._upto = ring.since + (lap + 1) * ring.steps + slot
        if read:
            self._reading = {each: self._submit(each) for each in range(step, self._upto)}
        if len(members) > 1:
            receiving = self._receive_all(ring, members[self._place(members) - 1], self._upto)
            self._receiver = asyncio.get_running_loop().create_task(receiving, name="receive samples")

    def _own(self, ring: Ring, step: int, place: int) -> Indices:
        """This worker's share of its group's batch."""
        ids = ring.indices(step, place)
        index, size = self._share(step)
        return ids[slice(*even_bounds(len(ids), size, index))]

    async def _waited(self, step: int) -> Block:
        def neighbour() -> PeerId:
            _, members = self._plan.at(step)
            return members[self._place(members) - 1]

        async with in_time(neighbour, f"the samples of step {step}", self._timeout_s):
            while step not in self._blocks:
                if self._broken is not None:
                    if not self._survives:
                        raise self._broken
                    self._repeat(step)
                    break
                self._changed.clear()
                await self._changed.wait()
        return self._blocks[step]

    def _repeat(self, step: int) -> None:
        """What was due is lost with the neighbour, and which members have copies is known only once all agree that it is gone."""
        block = self._used[max(self._used)]
        self._blocks[step] = block
        self.ledger.repeated += len(block.ids)

    async def _receive_all(self, ring: Ring, source: PeerId, first: int) -> None:
        step = first
        while True:
            try:
                block = await self._receive(source, ("ring", ring.since, step))
            except PeerLostError as error:
                self._broken = error
                self._changed.set()
                return
            if step not in self._reading:
                self._blocks[step] = block
            self.ledger.received += len(block.ids)
            step += 1
            self._upto = step
            self._changed.set()

    async def _receive(self, source: PeerId, tag: Tag) -> Block:
        start_s = asyncio.get_running_loop().time()
        ids = await self._endpoint.receive(source, (*tag, "ids"))
        assert isinstance(ids, TensorPayload)
        own = ids.numpy().copy()
        payloads = [await self._endpoint.receive(source, (*tag, field)) for field in range(self._contents.fields)]
        block = Block(own, self._contents.unpack(payloads))
        now = asyncio.get_running_loop().time()
        self._recorder.add_span("receive samples", "receive", start_s, now, values={"samples": len(own)})
        return block

    async def _send(self, to: PeerId, tag: Tag, block: Block) -> None:
        with suppress(PeerLostError), self._recorder.span(f"send samples to {to}", "send"):
            await self._endpoint.send(to, (*tag, "ids"), TensorPayload.of(block.ids), priority=PRIORITY)
            for field, payload in enumerate(self._contents.pack(block)):
                await self._endpoint.send(to, (*tag, field), payload, priority=PRIORITY)
            self.ledger.sent += len(block.ids)

    def _start(self, sending: Any) -> None:
        task = asyncio.get_running_loop().create_task(sending, name="send samples")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def _place(self, members: Sequence[PeerId]) -> int:
        return members.index(self._name)

    # A change of the members.

    async def _regroup(self, step: int) -> None:
        """Begin the ring of ``step``."""
        late, self._late = self._late, False
        if late:
            await self._take_parts(step)
            self._stock_at(step).set_result({})
        else:
            await self._take_stock(step)
        ring, members = self._plan.at(step)
        here = dict(await self._stock_at(step))
        wanted = [int(sample) for sample in ring.parts[self._place(members)]]
        absent = [sample for sample in wanted if sample not in here]
        for holder, ids in self._plan.holders(step, self._endpoint.peer, absent, late=late):
            missing = [sample for sample in ids if sample not in here]
            for start in range(0, len(missing), MOST_AT_ONCE):
                here |= await self._ask(holder, step, missing[start : start + MOST_AT_ONCE])
        here |= await self._read_again([sample for sample in wanted if sample not in here])
        self.ledger.lost += [sample for sample in wanted if sample not in here]
        self._blocks.clear()
        self._used.clear()
        found = [sample for sample in wanted if sample in here] or list(here)[:1]
        for slot, ids in enumerate(ring.spread(found)):
            content = self._contents.gather([here[sample] for sample in ids])
            self._blocks[step + slot] = Block(np.array(ids, np.int64), content)
        self._begin(ring, read=False, step=step)

    async def _take_stock(self, step: int) -> None:
        """Wait for what remaining neighbours are still sending, then note everything that is here."""
        ring, before = self._plan.before(step)
        _, members = self._plan.at(step)
        neighbour = before[self._place(before) - 1]
        if len(before) > 1 and neighbour in members:
            async with in_time(neighbour, f"its samples of the steps before {step}", self._timeout_s):
                while self._upto < step + ring.steps and self._broken is None:
                    self._changed.clear()
                    await self._changed.wait()
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.wait({self._receiver})
        for each, reading in list(self._reading.items()):
            self._blocks[each] = await reading
        self._reading.clear()
        rows: dict[int, tuple[Any, int]] = {}
        for block in [*self._used.values(), *self._blocks.values()]:
            rows |= {int(sample): (block.content, row) for row, sample in enumerate(block.ids)}
        self._stock_at(step).set_result(rows)
        for older in [each for each in self._stock if each < step]:
            del self._stock[older]

    def _stock_at(self, step: int) -> asyncio.Future[dict[int, tuple[Any, int]]]:
        if step not in self._stock:
            self._stock[step] = asyncio.get_running_loop().create_future()
        return self._stock[step]

    async def _ask(self, holder: PeerId, step: int, missing: list[int]) -> Mapping[int, tuple[Any, int]]:
        """Those of the missing samples that ``holder`` has, by sample, each as (content, row)."""
        try:
            wanted = np.array(missing, np.int64).tobytes()
            answer = await self._endpoint.request(holder, _WANT, step, wanted, timeout=self._timeout_s)
            if not isinstance(answer.meta, int) or not answer.meta:
                return {}
            async with in_time(holder, f"the samples that are missing from step {step} on", self._timeout_s):
                block = await self._receive(holder, ("ring given", step, answer.meta))
        except PeerLostError:
            return {}
        self.ledger.recovered += len(block.ids)
        return {int(sample): (block.content, row) for row, sample in enumerate(block.ids)}

    async def _read_again(self, missing: list[int]) -> Mapping[int, tuple[Any, int]]:
        """Read samples without copies from the dataset, if this host has it. (In the first lap no other member has had them.)"""
        if not missing:
            return {}
        ids = np.array(missing, np.int64)
        try:
            content = await self._thread.submit(lambda: self._contents.read(ids))
        except TaskError:
            return {}
        self.ledger.read_again += len(missing)
        return {sample: (content, row) for row, sample in enumerate(missing)}

    async def _on_want(self, caller: PeerId, step: Value, wanted: Value) -> Value:
        if not isinstance(step, int) or not isinstance(wanted, bytes) or len(wanted) % 8:
            raise ProtocolError(f"{caller} sent a malformed request for samples")
        rows = await asyncio.shield(self._stock_at(step))
        found = [int(sample) for sample in np.frombuffer(wanted, np.int64) if int(sample) in rows]
        if not found:
            return 0
        number = 1 + int(found[0])
        block = Block(np.array(found, np.int64), self._contents.gather([rows[sample] for sample in found]))
        self._start(self._send(caller, ("ring given", step, number), block))
        return number

    async def _take_parts(self, step: int) -> None:
        """Learn from a neighbour which ring is in use."""
        _, members = self._plan.at(step)
        neighbour = self._whom() or next(peer for peer in members if peer != self._endpoint.peer)
        answer = await self._endpoint.request(neighbour, _PARTS, step, timeout=self._timeout_s)
        parts = []
        async with in_time(neighbour, "the parts of the sample ring", self._timeout_s):
            for part in range(len(members)):
                payload = await self._endpoint.receive(neighbour, ("ring parts", step, part))
                assert isinstance(payload, TensorPayload)
                parts.append(payload.numpy().copy())
        match answer.meta:
            case [int(batch_size), int(since)]:
                self._plan.begin(Ring(tuple(parts), batch_size, since), members)
            case _:
                raise ProtocolError(f"{neighbour} answered {_PARTS} with {answer.meta!r:.60}")
        for since, others in self._meanwhile:
            self._plan.change(since, others)
        self._knows = True
        self._changed.set()

    async def _on_parts(self, caller: PeerId, step: Value) -> Value:
        if not isinstance(step, int):
            raise ProtocolError(f"{caller} sent a malformed request for the parts of the ring")
        while not self._knows:  # it asks for that itself; whoever asks has a time-out
            self._changed.clear()
            await self._changed.wait()
        ring, _ = self._plan.at(step)
        payloads: list[Payload] = [TensorPayload.of(part) for part in ring.parts]
        for part, payload in enumerate(payloads):
            await self._endpoint.send(caller, ("ring parts", step, part), payload)
        return [ring.batch_size, ring.since]
