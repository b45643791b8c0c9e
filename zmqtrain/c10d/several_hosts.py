"""A process group whose ranks run on several hosts: in memory within a host, over ZeroMQ between hosts.

What is small goes straight from thread to thread (`zmqtrain.c10d.direct`), everything else through the endpoint and its event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from types import MappingProxyType
from typing import Any

import torch
import zmq
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from zmqtrain.c10d.descriptor import Descriptor, require_equal
from zmqtrain.c10d.direct import Direct, copied
from zmqtrain.c10d.errors import MismatchError
from zmqtrain.c10d.network_thread import NetworkThread
from zmqtrain.c10d.one_host import OneHost, require_splits
from zmqtrain.c10d.transport import RankTransport
from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_reduce, barrier, broadcast
from zmqtrain.errors import PeerLostError, PeerTimeoutError, ProtocolError
from zmqtrain.host.channel import Done
from zmqtrain.host.sums import Combine, sum_into
from zmqtrain.host.team import LOOK_S
from zmqtrain.host.window import as_bytes
from zmqtrain.net.blocking import BlockingSockets
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.net.node import Node
from zmqtrain.waiting import abandoned, first_error, in_time
from zmqtrain.wire.dtypes import dtype_of_torch
from zmqtrain.wire.tensor import TensorPayload

#: The most bytes in which a rank says why the ranks of its host refuse a call.
_REFUSAL_BYTES = 1024
#: So many bytes more are sent if that takes one message less, or one wait less.
TOGETHER_BYTES = 256 * 1024
#: Tensors of up to this many bytes are copied, and go directly to their receiver.
PIECE_BYTES = 2 * 1024 * 1024
#: Sums of up to this many bytes a rank are made directly, in blocks of which each rank gets a piece from each other one. Of larger
#: ones the copy of all that is sent costs more than the steps of the event loop.
DIRECT_BYTES = 8 * 1024 * 1024
#: What the processor needs of an element's address; that of a complex one need not be a multiple of its size.
_ALIGNMENT = 8
#: In plain text larger tensors are sent in pieces of this many bytes, which is more than usual: nothing urgent goes over the
#: connections of a process group, and each piece takes processor time, whatever its size. Where they are encrypted this would be
#: slow: a piece is encrypted as a whole before any of it is sent, and decrypted when all of it has arrived.
CHUNK_BYTES = 4 * 1024 * 1024
#: Messages of up to this many bytes are copied, and nobody waits until they have arrived. So their acknowledgements can wait for a
#: message with which they travel, for so many seconds: a program that calls one small operation after another always has one.
EAGER_BYTES = 128 * 1024
ACK_S = 0.004
_REFUSED = b"!"
#: Before the name of a rank that is lost, a line's end, and why.
_LOST = b"?"
#: How long a process that ends waits for what it has sent to arrive, while nothing arrives.
LEAVE_S = 5.0
_NOTHING: Mapping[int, Tensor] = MappingProxyType({})


class SeveralHosts:
    """Implements `zmqtrain.c10d.transport.RankTransport` over hosts.

    Sums are made within each host first. Then rank i of each host handles slice i, with its counterparts on the other hosts: so a
    host's sum is sent once, by all its ranks at the same time. Everything else is sent from rank to rank.
    """

    def __init__(
        self,
        network: NetworkThread,
        node: Node,
        sockets: BlockingSockets,
        here: OneHost,
        peers: Sequence[PeerId],
        addresses: Sequence[str],
        hosts: Sequence[Sequence[int]],
        rank: int,
        *,
        timeout_s: float,
        setting: str,
    ) -> None:
        """``here``: the ranks of this host; ``hosts``: the ranks of each host; ``peers``: the names of all ranks on the network;
        ``addresses``: where they are."""
        self._network, self._node, self._here = network, node, here
        self._rank, self._peers, self._hosts = rank, tuple(peers), hosts
        self._timeout_s, self._setting = timeout_s, setting
        self._own = next(ranks for ranks in hosts if rank in ranks)
        self._place = self._own.index(rank)
        self._slices = min(map(len, hosts))
        self._even = max(map(len, hosts)) == self._slices
        self._count = itertools.count()
        self._column: Group | None = None
        self._counterparts = _counterparts(hosts, rank)
        # A piece is encrypted as a whole before any of it is sent.
        self._piece_bytes = min(PIECE_BYTES, node.settings.chunk_bytes)
        self._by_host = [each for ranks in hosts for each in ranks if each == rank or each in self._counterparts]
        self._met = True  # whether the ranks of this host have compared what they call
        self._begun: bytes | None = None  # the descriptor that the ranks of other hosts have not confirmed yet
        self._more = ""
        self._surplus: dict[int, deque[tuple[int, Tensor]]] = {}  # rank -> messages that came while another rank's was taken
        self._all_ranks = network.call(self._make_groups())
        self._direct = Direct(network.loop, node, sockets, {each: peers[each] for each in self._counterparts}, peers[rank])
        # A rank that has never been connected could end without anybody's notice.
        self._await(self._direct.meet(dict(enumerate(addresses))), "the ranks of other hosts to connect")
        # Programs end without destroying their group, and nobody here waits for what a rank says of its last operation. Run at the
        # end of the interpreter, and of what `multiprocessing` has forked, which ends without it.
        self._at_exit: Any = Finalize(None, self._leave, exitpriority=0)

    async def _make_groups(self) -> Group:
        place = self._place
        if place < self._slices:
            members = tuple(self._peers[ranks[place]] for ranks in self._hosts)
            name = f"slice/{place}"
            self._column = self._group(members, members.index(self._node.peer), name)
        return self._group(self._peers, self._rank, "all ranks")

    def _group(self, members: tuple[PeerId, ...], rank: int, name: str) -> Group:
        return Group(self._node, members, rank, name, timeout_s=self._timeout_s, chunk_bytes=self._node.settings.chunk_bytes)

    @property
    def goes_on(self) -> tuple[type[Exception], ...]:
        """None: where ranks of another host disagree, parts of the operation are on their way."""
        return ()

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = self._here.timeout_s = self._all_ranks.timeout_s = timeout_s
        if self._column is not None:
            self._column.timeout_s = timeout_s

    def look(self, what: str) -> None:
        self._here.look(what)

    def begin(self, descriptor: Descriptor, more: str, *, before: bool) -> None:
        """The next use of the host's memory compares within the host, the next one of the network with other hosts."""
        packed = descriptor.pack()
        self._begun, self._more = packed, more

        def check(packed: list[bytes]) -> None:
            require_equal(packed, [self._peers[rank] for rank in self._own], more=more)

        if len(self._own) > 1:
            self._here.check(packed, check)
            self._met = False
        if before:
            self._call(None, "what the ranks of other hosts call")

    def _meet(self) -> None:
        """All ranks of this host have called the same, before others hear of it."""
        if not self._met:
            self._met = True
            with self._others_hear():
                self._here.barrier("what the ranks of this host call")

    def all_reduce(self, flat: Tensor, combine: Combine, what: str, *, root: int | None = None) -> None:
        tag = self._tag()
        result = flat if root is None or root == self._rank else flat.clone()
        alone = len(self._own) == 1
        if not alone:
            self._met = True
            with self._others_hear():
                self._here.all_reduce(result, combine, what)
        if not alone and self._even and _nbytes(result) * (len(self._peers) - self._slices) <= TOGETHER_BYTES:
            # To gather slices would be one wait more.
            self._combine(result, [ranks[self._place] for ranks in self._hosts], combine, what)
            return
        place = self._place
        parts = [result[start:stop] for start, stop in bounds(result.numel(), self._slices)]
        if self._column is None or not parts[place].numel():
            self._call(None, what)
        elif _nbytes(parts[place]) > DIRECT_BYTES and _adds(combine, flat.dtype):
            self._call(all_reduce(self._column, _payload(parts[place], flat.dtype), tag), what)
        else:
            self._combine(parts[place], [ranks[place] for ranks in self._hosts], combine, what)
        if alone:
            return
        # Ranks of a host beyond the number of slices have none.
        nothing = result.new_empty(0)
        gathered = [parts[index] if index < self._slices else nothing for index in range(len(self._own))]
        self._here.all_gather(gathered, gathered[place], what)

    def broadcast(self, flat: Tensor, root: int, what: str) -> None:
        if _nbytes(flat) * (len(self._peers) - 1) <= self._piece_bytes:
            others = dict.fromkeys(range(len(self._peers)), flat) if root == self._rank else {}
            self._exchange(others, {} if others else {root: flat}, self._tag(), what)
            return
        self._call(broadcast(self._all_ranks, _payload(flat), self._tag(), root=root), what)

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor, what: str) -> None:
        self._exchange(dict.fromkeys(range(len(self._peers)), own), dict(enumerate(outputs)), self._tag(), what)

    def gather(self, outputs: Sequence[Tensor] | None, own: Tensor, root: int, what: str) -> None:
        self._exchange({root: own}, {} if outputs is None else dict(enumerate(outputs)), self._tag(), what)

    def scatter(self, output: Tensor, parts: Sequence[Tensor] | None, root: int, what: str) -> None:
        self._exchange({} if parts is None else dict(enumerate(parts)), {root: output}, self._tag(), what)

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], combine: Combine, what: str) -> None:
        tag = self._tag()
        out = {rank: part for rank, part in enumerate(parts) if rank != self._rank}
        if all(self._goes_directly(rank, tensor) for rank, part in out.items() for tensor in (part, output)):
            found = self._call(None, what, out, dict.fromkeys(out, output))
        else:
            found = {rank: torch.empty_like(output) for rank in out}
            self._exchange(out, found, tag, what)
        sum_into([output], [found.get(rank, part) for rank, part in enumerate(parts)], combine=combine)

    def all_to_all(self, outputs: Sequence[Tensor], parts: Sequence[Tensor], what: str) -> None:
        own = torch.tensor([each.numel() * each.element_size() for each in (*parts, *outputs)], dtype=torch.int64)
        lengths = torch.empty(len(self._peers), len(own), dtype=torch.int64)
        self._exchange(dict.fromkeys(range(len(self._peers)), own), dict(enumerate(lengths)), self._tag(), what)
        require_splits(lengths, self._peers, what)
        self._exchange(dict(enumerate(parts)), dict(enumerate(outputs)), self._tag(), what)

    def barrier(self, what: str) -> None:
        # A rank says what it calls once all ranks of its host have called it, and hears so of at least one of each other host.
        self._call(None if self._begun is not None else barrier(self._all_ranks, self._tag()), what)

    def send(self, to: int, tag: int, flat: Tensor, what: str) -> None:
        self._await(self._unless_lost(to, self._send(to, ("message", tag), flat), what), what)

    def post(self, sources: Sequence[int], tag: int, flat: Tensor, what: str, done: Done) -> None:
        async def receive() -> None:
            error: Exception | None = None
            source = sources[0]
            try:
                async with in_time("any rank" if len(sources) > 1 else self._peers[source], what, self._timeout_s, self._setting):
                    source = await self._receive(sources, tag, as_bytes(flat), what)
            except (Exception, asyncio.CancelledError) as failed:  # noqa: BLE001 - passed to those who wait
                told = self._told(first_error(failed), what)
                error = told if isinstance(told, Exception) else PeerLostError(self._peers[self._rank], "the group was destroyed")
            done(source, error)

        asyncio.run_coroutine_threadsafe(receive(), self._network.loop)

    async def _receive(self, sources: Sequence[int], tag: int, flat: Tensor, what: str) -> int:
        """Receive a message of one of these ranks. Returns whose it was. Raises `ProtocolError` if it has another size."""
        for source in sources:
            for place, (found, content) in enumerate(self._surplus.get(source, ())):
                if found == tag:
                    del self._surplus[source][place]
                    if content.numel() != flat.numel():
                        raise ProtocolError(f"{what}: {content.numel():,} bytes were sent, but {flat.numel():,} were expected")
                    flat.copy_(content)
                    return source
        if len(sources) == 1:
            await self._unless_lost(sources[0], self._message(sources[0], tag, flat, what), what)
            return sources[0]
        contents = {source: torch.empty_like(flat) for source in sources}
        waits = {asyncio.create_task(self._message(each, tag, content, what)): each for each, content in contents.items()}
        try:
            arrived, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await abandoned(waits)
        ended = {source: wait.exception() for wait, source in waits.items() if not wait.cancelled()}
        misfit = next((error for error in ended.values() if isinstance(error, ProtocolError)), None)
        came = [source for source, error in ended.items() if error is None]
        if not came and misfit is None:
            raise next(iter(arrived)).exception() or PeerLostError("any rank", "it has left")
        for source in came if misfit else came[1:]:
            self._surplus.setdefault(source, deque()).append((tag, contents[source]))
        if misfit is not None:
            raise misfit
        flat.copy_(contents[came[0]])
        return came[0]

    async def _message(self, source: int, tag: int, flat: Tensor, what: str) -> None:
        """Raises `ProtocolError` if the message has another size."""
        try:
            await self._node.receive(self._peers[source], ("message", tag), into=_payload(flat))
        except ValueError as error:
            raise ProtocolError(f"{what}: {flat.numel():,} bytes were expected, but the message has another size") from error

    def _leave(self) -> None:
        """The process ends: let what it has sent arrive, and end the thread, which must not run while the interpreter ends."""
        with suppress(Exception):  # nobody is left who could be told
            self._network.call(self._finish(LEAVE_S))
        self._direct.close()
        with suppress(Exception):
            self._network.call(self._node.close())
        self._network.stop()

    async def _finish(self, timeout_s: float) -> None:
        """What this rank has sent arrives."""
        await self._direct.hand_over()
        await self._node.finish(timeout=timeout_s)

    def close(self, error: Exception | None = None) -> None:
        if not self._at_exit.still_active():
            return
        self._at_exit.cancel()
        try:
            if error is None:
                self._network.call(self._finish(self._timeout_s))
        finally:
            self._direct.close()
            self._network.call(self._node.close())
            self._network.close()
            self._here.close(error)

    @contextmanager
    def _others_hear(self) -> Iterator[None]:
        """The ranks of other hosts, which wait for this one's call, are told what fails within this host."""
        try:
            yield
        except MismatchError as error:
            self._begun = _REFUSED + str(error).encode()[:_REFUSAL_BYTES]
            self._call(None, "what the ranks of other hosts call")
            raise
        except PeerLostError as error:
            self._begun = None
            # Without waiting for what they call: they may be at another point.
            for rank in self._counterparts:
                self._direct.send(rank, _LOST + f"{error.peer}\n{error.reason}".encode()[:_REFUSAL_BYTES])
            raise

    async def _unless_lost(self, rank: int, work: Coroutine[Any, Any, None], what: str) -> None:
        """Await ``work``. Raises `PeerLostError` if that rank is of this host and lost: there may be no connection that tells."""
        if rank not in self._own:
            await work
            return
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=LOOK_S)
                try:
                    self._here.look(what, [self._own.index(rank)])
                except PeerLostError:
                    await asyncio.wait([task], timeout=LOOK_S)  # what it has sent before
                    if not task.done():
                        raise
            task.result()
        finally:
            await abandoned([task])

    def _combine(self, part: Tensor, members: Sequence[int], combine: Combine, what: str) -> None:
        """Combine the slice over ``members``, one rank of each host, in their order."""
        mine = members.index(self._rank)

        def others(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
            return {rank: each for rank, each in zip(members, tensors, strict=True) if rank != self._rank}

        def add(own: Tensor, found: Mapping[int, Tensor]) -> None:
            sum_into([own], [found.get(rank, own) for rank in members], combine=combine)

        # Blocks take two messages where whole tensors take one, but fewer bytes if there are more than two members.
        surplus = _nbytes(part) * (len(members) - 1) * (len(members) - 2) // len(members)
        if _nbytes(part) <= self._piece_bytes and surplus <= TOGETHER_BYTES:
            add(part, self._call(None, what, others([part] * len(members)), others([part] * len(members))))
            return
        # Each member combines a part of each block. What belongs to the next block is on its way meanwhile.
        blocks = _blocks(part, len(members), self._piece_bytes)
        found = self._call(None, what, others(blocks[0]), others([blocks[0][mine]] * len(members)))
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            if following is not None:
                self._post(others(following))
            add(block[mine], found)
            self._post(others([block[mine]] * len(members)))
            if following is not None:
                found = self._take(others([following[mine]] * len(members)), what)
            for rank, content in self._take(others(block), what).items():
                block[members.index(rank)].copy_(content)

    def _exchange(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor], tag: Tag, what: str) -> None:
        """Send to some ranks, and receive from some. What is small travels with what the ranks call."""
        if self._rank in into:
            into[self._rank].copy_(out[self._rank])

        def divided(tensors: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
            others = {rank: each for rank, each in tensors.items() if rank != self._rank}
            small = {rank: each for rank, each in others.items() if self._goes_directly(rank, each)}
            return small, {rank: each for rank, each in others.items() if rank not in small}

        (small_out, large_out), (small_into, large_into) = divided(out), divided(into)
        work = self._exchange_others(large_out, large_into, tag) if large_out or large_into else None
        for rank, content in self._call(work, what, small_out, small_into).items():
            into[rank].copy_(content)

    def _goes_directly(self, rank: int, tensor: Tensor) -> bool:
        """Whether this tensor, between this rank and another one, is small, and both compare what they call."""
        return rank in self._counterparts and _nbytes(tensor) <= self._piece_bytes

    async def _exchange_others(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor], tag: Tag) -> None:
        async with asyncio.TaskGroup() as tasks:
            for rank, tensor in out.items():
                tasks.create_task(self._send(rank, tag, tensor))
            for rank, tensor in into.items():
                tasks.create_task(self._node.receive(self._peers[rank], tag, into=_payload(tensor)))

    async def _send(self, to: int, tag: Tag, tensor: Tensor) -> None:
        if tensor.numel() * tensor.element_size() <= EAGER_BYTES:
            await self._node.send(self._peers[to], tag, TensorPayload.of(as_bytes(tensor).clone()))
            return
        sent = await self._node.send(self._peers[to], tag, _payload(tensor))
        await sent.wait_released()

    def _tag(self) -> Tag:
        """One per operation, the same on all ranks: all ranks take one, even those that have nothing to send."""
        return ("operation", next(self._count))

    def _call(
        self,
        work: Coroutine[Any, Any, None] | None,
        what: str,
        out: Mapping[int, Tensor] = _NOTHING,
        into: Mapping[int, Tensor] = _NOTHING,
    ) -> dict[int, Tensor]:
        """Await ``work``, and compare what the ranks call if that has not been done; ``out`` travels with it.

        Returns what the ranks of ``into`` have sent, as tensors like those, which must not be written.

        For collectives only, which are carried out one after another: what has begun is the one that is carried out.
        """
        try:
            self._meet()
        except BaseException:
            if work is not None:
                work.close()
            raise
        begun, self._begun = self._begun, None
        under_way = None if work is None else self._begin(work, what)
        try:
            found = self._compare(begun, out, into, what)
        except BaseException:
            if under_way is not None:
                under_way.cancel()
            raise
        if under_way is not None:
            self._result(under_way, what)
        return found

    def _await(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Await ``work`` for as long as the time-out allows."""
        self._result(self._begin(work, what), what)

    def _begin(self, work: Coroutine[Any, Any, None], what: str) -> Future[None]:
        async def limited() -> None:
            async with in_time("a rank of another host", what, self._timeout_s, self._setting):
                await work

        return self._network.begin(limited())

    def _result(self, work: Future[None], what: str) -> None:
        try:
            work.result()
        except (BaseExceptionGroup, TimeoutError, PeerLostError) as error:
            raise self._told(first_error(error), what) from None

    def _compare(self, begun: bytes | None, out: Mapping[int, Tensor], into: Mapping[int, Tensor], what: str) -> dict[int, Tensor]:
        """Raise `MismatchError` if the ranks of other hosts have begun another operation; exchange tensors with them."""
        if begun is None:
            self._post(out)
            return self._take(into, what)
        self._post({**dict.fromkeys(self._counterparts), **out}, begun)
        found = self._received(self._counterparts, what)
        if begun.startswith(_REFUSED):
            return {}  # this rank has its error
        self._require_equal(begun, {rank: call for rank, (call, _) in found.items()})
        return {rank: self._like(tensor, rank, found[rank][1]) for rank, tensor in into.items()}

    def _post(self, out: Mapping[int, Tensor | None], call: bytes = b"") -> None:
        """Send tensors to ranks of other hosts, or only what this rank calls."""
        bodies: dict[int, zmq.Frame | None] = {}  # by the tensor, which may go to several
        for rank, tensor in out.items():
            if id(tensor) not in bodies:
                bodies[id(tensor)] = copied(tensor) if tensor is not None and tensor.numel() else None
            self._direct.send(rank, call, bodies[id(tensor)])

    def _take(self, into: Mapping[int, Tensor], what: str) -> dict[int, Tensor]:
        """What these ranks have sent, as tensors like these."""
        return {rank: self._like(into[rank], rank, content) for rank, (_, content) in self._received(into, what).items()}

    def _received(self, ranks: Iterable[int], what: str) -> dict[int, tuple[bytes, Tensor]]:
        """The next message of each rank: what it calls, and bytes. Raises `PeerLostError` if a rank says that one is lost."""
        found = {}
        try:
            for rank in ranks:
                call, _ = found[rank] = self._direct.receive(rank, what, self._timeout_s, self._setting)
                if call.startswith(_LOST):
                    lost, _, reason = call.removeprefix(_LOST).decode(errors="replace").partition("\n")
                    raise PeerLostError(lost, f"{reason} (seen by {self._peers[rank]})")
        except PeerLostError as error:
            raise self._told(error, what) from None
        return found

    def _like(self, tensor: Tensor, rank: int, content: Tensor) -> Tensor:
        """The bytes that a rank has sent, as a tensor like this one."""
        expected = _nbytes(tensor)
        if content.numel() != expected:
            raise ProtocolError(f"{self._peers[rank]} sent {content.numel()} bytes, but {expected} were expected")
        if content.data_ptr() % min(tensor.element_size(), _ALIGNMENT):
            content = content.clone()
        return content.view(tensor.dtype)

    def _require_equal(self, begun: bytes, found: dict[int, bytes]) -> None:
        """``begun``: what this rank calls; ``found``: what ranks of other hosts call, or why they refuse to."""
        for rank, content in found.items():
            if content.startswith(_REFUSED):
                text = content.removeprefix(_REFUSED).decode(errors="replace")
                raise MismatchError(f"{text} (seen by {self._peers[rank]})")
        ranks = self._by_host
        packed = [begun if rank == self._rank else found[rank] for rank in ranks]  # the same one comes first, on all ranks
        require_equal(packed, [self._peers[rank] for rank in ranks], more=self._more)

    def _told(self, error: BaseException, what: str) -> BaseException:
        """The error in terms of the process group."""
        if isinstance(error, PeerLostError):
            return PeerLostError(error.peer, error.reason, waiting_for=what)
        if isinstance(error, TimeoutError):
            peer = error.peer if isinstance(error, PeerTimeoutError) else "a rank of another host"
            return PeerTimeoutError(peer, what, self._timeout_s, self._setting)
        return error


def _payload(tensor: Tensor, dtype: torch.dtype = torch.uint8) -> TensorPayload:
    """A tensor's memory, as a payload of elements of this type.

    After an array of numpy was made of it, a storage cannot be resized, as FSDP does with what it has gathered. So the payload is
    of another storage with the same memory.
    """
    content = as_bytes(tensor)
    return TensorPayload.of((from_dlpack(content) if content.numel() else content).view(dtype))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _adds(combine: Combine, dtype: torch.dtype) -> bool:
    """Whether the endpoints' collectives can do it."""
    return combine is torch.add and dtype_of_torch(dtype).kind in ("float", "int") and dtype.itemsize > 1


def _blocks(part: Tensor, count: int, piece_bytes: int) -> list[list[Tensor]]:
    """Each block has a piece of each of ``count`` slices of a tensor. The pieces of a slice are consecutive."""
    slices = bounds(part.numel(), count)
    room = max(1, piece_bytes // part.element_size())
    longest = max(stop - start for start, stop in slices)
    return [
        [part[min(start + first, stop) : min(start + first + room, stop)] for start, stop in slices]
        for first in range(0, longest, room)
    ]


def _counterparts(hosts: Sequence[Sequence[int]], rank: int) -> list[int]:
    """The ranks of other hosts with which this one compares its calls: at least one of each host, and both have one another."""
    own = next(ranks for ranks in hosts if rank in ranks)
    place, found = own.index(rank), []
    for ranks in hosts:
        if ranks is not own:
            period = min(len(own), len(ranks))
            found += [other for index, other in enumerate(ranks) if index % period == place % period]
    return found


# Checked here, so that a missing method is found by the type checker.
_IS_TRANSPORT: type[RankTransport] = SeveralHosts
