"""The `Fabric` of a real compute group: layers in a compute thread, messages on the event loop, over an endpoint.

An operation is begun by handing a coroutine to the loop, and waited for at a condition of the device's: so it runs on real threads
as it does on virtual time. Within a host tensors pass through shared memory (`zmqtrain.net.shared`); nothing here knows of that.

Tensors without content (on torch's meta device, as modelled compute has them) travel as their sizes, and arrive as such tensors.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce, sent_by_all_reduce
from zmqtrain.data.background import Condition
from zmqtrain.data.bridge import Begun, Bridge
from zmqtrain.errors import ProtocolError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.parallel.communicator import AT_ONCE_BYTES, Communicator, Expected, Label, Pending, Ready
from zmqtrain.parallel.turns import handing_over
from zmqtrain.waiting import first_error, in_time
from zmqtrain.wire.dtypes import dtype_of_torch
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload


class NetworkFabric:
    """This worker's connections to the others of its compute group. Made on the event loop; layers use it in the compute thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        peers: tuple[PeerId, ...],
        name: str,
        *,
        condition: Condition | None = None,
        clock: Callable[[], float] | None = None,
        timeout_s: float = 60.0,
        recorder: Recorder | None = None,
        zeros: bool = False,
    ) -> None:
        """Call it on the event loop of ``endpoint``, on every worker of the group; `close` it there.

        Args:
            endpoint: this worker's (`zmqtrain.membership.context.RoleContext.endpoint`), which knows the others' addresses.
            peers: the group's workers, by rank, this one among them; the same on all.
            name: begins all tags: another for each group and fabric on these endpoints, the same on all of the group.
            condition: what the compute thread waits at, of its device; by default it waits in real time.
            clock: of the device, in seconds; by default the event loop's.
            timeout_s: how long an operation may wait for others. It raises `PeerTimeoutError` then.
            recorder: takes the spans of operations and of waiting.
            zeros: tensors without content travel as zeros of the same number, so that a real network has something to carry.

        Raises `ValueError` where ``endpoint`` is none of ``peers``.
        """
        self.rank, self.size = peers.index(endpoint.peer), len(peers)
        self.messages: Counter[Label] = Counter()
        """Messages that this worker has sent, by label."""
        self.nbytes: Counter[Label] = Counter()
        """Bytes of tensors in them."""
        self.waited_s = 0.0
        """Seconds that the compute thread has waited for others: exposed communication."""
        self._group = Group(endpoint, peers, self.rank, name, timeout_s=timeout_s)
        clock = clock or asyncio.get_running_loop().time
        self._bridge = Bridge(
            condition or threading.Condition(), clock, 2 * timeout_s
        )  # operations are limited to timeout_s themselves
        self._clock, self._timeout_s = clock, timeout_s
        self._recorder: Recorder = recorder or NullRecorder()
        self.zeros = zeros
        self._communicators: dict[tuple[int, ...], NetworkCommunicator] = {}

    def among(self, members: tuple[int, ...]) -> Communicator:
        if members not in self._communicators:
            self._communicators[members] = NetworkCommunicator(self, self._group.part(members))
        return self._communicators[members]

    def abort(self, error: BaseException) -> None:
        """Every wait, now and later, raises ``error``. From any thread."""
        self._bridge.abort(error)

    async def close(self) -> None:
        """Give up what is under way."""
        await self._bridge.close()

    # For communicators, in the compute thread.

    def begin(self, work: Callable[[], Coroutine[Any, Any, list[Tensor]]], label: Label, peers: str) -> Pending:
        """Let the loop do ``work``; ``peers`` are waited for."""
        return _Operation(self, self._bridge.begin(self._limited(work, label, peers), str(label)))

    def count(self, label: Label, nbytes: int, messages: int = 1) -> None:
        """Something is being sent."""
        if nbytes:
            self.messages[label] += messages
            self.nbytes[label] += nbytes

    def payload(self, flat: Tensor) -> Payload:
        """The payload that stands for a flat tensor: its memory, or only its size for a tensor on the meta device."""
        if not flat.is_meta:
            return TensorPayload.of(flat)
        name = dtype_of_torch(flat.dtype).name
        if self.zeros:
            return TensorPayload.of(torch.zeros(flat.numel(), dtype=flat.dtype))
        return PhantomPayload(flat.numel(), name)

    def wait(self, begun: Begun[list[Tensor]]) -> list[Tensor]:
        """Block until the operation has ended."""
        if begun.ended:
            return begun.wait()
        try:
            with self._recorder.span(f"wait for {begun.what}", "wait"), handing_over():
                return begun.wait()
        finally:
            self.waited_s += begun.waited_s

    # On the loop.

    async def _limited(self, work: Callable[[], Coroutine[Any, Any, list[Tensor]]], label: Label, peers: str) -> list[Tensor]:
        """What ``work`` returns. Raises the first of its errors, and `PeerTimeoutError` where it takes too long."""
        start_s = self._clock()
        try:
            async with in_time(peers, str(label), self._timeout_s):
                return await work()
        except ExceptionGroup as group:
            raise first_error(group) from None
        finally:
            self._recorder.add_span(str(label), "receive", start_s, self._clock())


class _Operation:
    """Implements `Pending`."""

    def __init__(self, fabric: NetworkFabric, begun: Begun[list[Tensor]]) -> None:
        self._fabric, self._begun = fabric, begun

    def wait(self) -> list[Tensor]:
        return self._fabric.wait(self._begun)


class NetworkCommunicator:
    """Implements `zmqtrain.parallel.communicator.Communicator` among some workers of a group."""

    def __init__(self, fabric: NetworkFabric, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self._fabric, self._group = fabric, group
        self._operations = 0
        self._sent: defaultdict[int, int] = defaultdict(int)  # member -> messages to it, point to point
        self._expected: defaultdict[int, int] = defaultdict(int)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Expected], label: Label) -> Pending:
        outgoing = [(to, self._tag(label, to, self._sent), _copied(part)) for to, part in sends if part.numel()]
        meta = any(part.is_meta for _, part in sends)
        incoming: list[tuple[Tag | None, Expected, Tensor]] = []
        for due in receives:
            tag = self._tag(label, due.source, self._expected) if math.prod(due.shape) else None
            incoming.append((tag, due, _memory(due.shape, due.dtype, meta)))
        for _, _, part in outgoing:
            self._fabric.count(label, part.nbytes)

        async def work() -> list[Tensor]:
            async with asyncio.TaskGroup() as tasks:
                for to, tag, part in outgoing:
                    tasks.create_task(self._send(to, tag, part))
                arriving = [
                    None
                    if due_tag is None
                    else tasks.create_task(self._receive(due.source, due_tag, memory, label, alone=not sends))
                    for due_tag, due, memory in incoming
                ]
            found = [memory if task is None else task.result() for task, (_, _, memory) in zip(arriving, incoming, strict=True)]
            return [memory.view(due.shape) for memory, (_, due, _) in zip(found, incoming, strict=True)]

        return self._begin(work, label, [sends[0][1].device] if sends else [])

    def all_gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]], label: Label) -> Pending:
        if tuple(part.shape) != tuple(shapes[self.rank]):
            raise ProtocolError(f"{label}: this rank's part has shape {tuple(part.shape)}, all others expect {shapes[self.rank]}")
        if self.size == 1:
            return Ready([part])
        number = self._next()
        parts = [_memory(shape, part.dtype, part.is_meta) for shape in shapes]
        parts[self.rank] = _copied(part)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for hop in range(self.size - 1):
            self._fabric.count(label, parts[(self.rank - hop) % self.size].nbytes)

        async def at_once() -> list[Tensor]:
            others = {peer: part for peer, part in enumerate(parts) if peer != self.rank}
            await self._at_once(self._group.tag((str(label), number)), dict.fromkeys(others, parts[self.rank]), others, label)
            return [each.view(shape) for each, shape in zip(parts, shapes, strict=True)]

        async def around() -> list[Tensor]:
            # Each sends on what it has received last.
            for hop in range(self.size - 1):
                out, come = parts[(self.rank - hop) % self.size], parts[(self.rank - hop - 1) % self.size]
                tag = self._group.tag((str(label), number, hop))
                async with asyncio.TaskGroup() as tasks:
                    if out.numel():
                        tasks.create_task(self._send(after, tag, out))
                    if come.numel():
                        tasks.create_task(self._receive(before, tag, come, label))
            return [each.view(shape) for each, shape in zip(parts, shapes, strict=True)]

        # Activations go around the ring that they are priced as.
        small = label.term == "statistics" and 0 < part.nbytes <= AT_ONCE_BYTES and len(set(map(tuple, shapes))) == 1
        return self._begin(at_once if small else around, label, [part.device])

    def all_reduce(self, tensor: Tensor, label: Label) -> Pending:
        if self.size == 1:
            return Ready([tensor.clone()])
        number, flat = self._next(), _copied(tensor)
        self._fabric.count(label, *reversed(sent_by_all_reduce(flat.numel(), flat.element_size(), self.size, self.rank)))

        async def work() -> list[Tensor]:
            if flat.numel():
                await all_reduce(self._group, self._fabric.payload(flat), (str(label), number))
            return [flat.view(tensor.shape)]

        return self._begin(work, label, [tensor.device])

    def reduce_scatter(self, parts: Sequence[Tensor], label: Label) -> Pending:
        own = parts[self.rank]
        if self.size == 1:
            return Ready([own.clone()])
        number = self._next()
        outgoing = {to: _copied(part) for to, part in enumerate(parts) if to != self.rank and part.numel()}
        come = [_memory(own.shape, own.dtype, own.is_meta) if source != self.rank else _copied(own) for source in range(self.size)]
        for part in outgoing.values():
            self._fabric.count(label, part.nbytes)

        async def work() -> list[Tensor]:
            into = {source: memory for source, memory in enumerate(come) if source != self.rank and memory.numel()}
            await self._at_once(self._group.tag((str(label), number)), outgoing, into, label)
            total = come[0]
            for memory in come[1:]:  # in the order of ranks, whichever came first
                total.add_(memory)
            return [total.view(own.shape)]

        return self._begin(work, label, [own.device])

    def _begin(
        self, work: Callable[[], Coroutine[Any, Any, list[Tensor]]], label: Label, devices: Sequence[torch.device]
    ) -> Pending:
        peers = ", ".join(peer for rank, peer in enumerate(self._group.members) if rank != self.rank)
        pending = self._fabric.begin(work, label, peers)
        device = next((device for device in devices if device.type not in ("cpu", "meta")), None)
        return pending if device is None else _OnDevice(pending, device)

    async def _at_once(self, tag: Tag, outgoing: Mapping[int, Tensor], into: Mapping[int, Tensor], label: Label) -> None:
        """Send to some ranks and receive from some."""
        async with asyncio.TaskGroup() as tasks:
            for to, part in outgoing.items():
                tasks.create_task(self._send(to, tag, part))
            for source, memory in into.items():
                tasks.create_task(self._receive(source, tag, memory, label))

    async def _send(self, to: int, tag: Tag, part: Tensor) -> None:
        # The endpoint keeps the memory, which is ours alone, until it has arrived.
        await self._group.endpoint.send(self._group.members[to], tag, self._fabric.payload(part))

    async def _receive(self, source: int, tag: Tag, memory: Tensor, label: Label, *, alone: bool = False) -> Tensor:
        """Into ``memory``, which is returned. ``alone``: nothing is sent that would tell whether tensors have content here."""
        peer = self._group.members[source]
        received = await self._group.endpoint.receive(peer, tag)
        numel, dtype = memory.numel(), dtype_of_torch(memory.dtype).name
        if received.numel != numel or received.dtype != dtype:
            raise ProtocolError(
                f"{label}: {peer} sent {received.numel} {received.dtype} where {numel} {dtype} were due: all "
                "workers of a group must have the same model, plan and input sizes"
            )
        if isinstance(received, PhantomPayload):
            if not memory.is_meta and not alone:
                raise ProtocolError(
                    f"{label}: {peer} sent a tensor without content: all workers of a group must compute, or all must model it"
                )
            return torch.empty_like(memory, device="meta")
        if not memory.is_meta:
            TensorPayload.of(memory).copy_(received)
        return memory

    def _next(self) -> int:
        self._operations += 1
        return self._operations

    def _tag(self, label: Label, peer: int, counts: dict[int, int]) -> Tag:
        counts[peer] += 1
        return self._group.tag((str(label), "to", counts[peer]))


class _OnDevice:
    """Results that are copied to another device when they are waited for."""

    def __init__(self, pending: Pending, device: torch.device) -> None:
        self._pending, self._device = pending, device

    def wait(self) -> list[Tensor]:
        return [each.to(self._device) for each in self._pending.wait()]


def _memory(shape: Sequence[int], dtype: torch.dtype, meta: bool) -> Tensor:
    return torch.empty(math.prod(shape), dtype=dtype, device="meta" if meta else "cpu")


def _copied(tensor: Tensor) -> Tensor:
    """Flat, in the host's memory, in memory of its own; a tensor without content stays one."""
    if tensor.is_meta:
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device="meta")
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).view(-1)
