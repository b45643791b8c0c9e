"""A process group whose ranks run on several hosts: in memory within a host, over ZeroMQ between hosts."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from zmqtrain.c10d.one_host import OneHost
from zmqtrain.c10d.transport import Transport
from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_reduce, barrier, broadcast
from zmqtrain.errors import PeerLostError, PeerTimeoutError
from zmqtrain.host.sums import Combine, sum_into
from zmqtrain.host.window import as_bytes
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.net.node import Node
from zmqtrain.waiting import first_error, in_time
from zmqtrain.wire.dtypes import dtype_of_torch
from zmqtrain.wire.tensor import TensorPayload

T = TypeVar("T")


class NetworkThread:
    """An event loop in a thread of its own, for callers that block."""

    def __init__(self) -> None:
        from zmqtrain.net.loop import new_event_loop

        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="zmqtrain-c10d-network", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` on the loop; block until it is done."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """End the loop and the thread."""
        self.call(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class SeveralHosts:
    """Implements `zmqtrain.c10d.transport.Transport` over hosts.

    Sums are made within each host first. Then rank i of each host deals with slice i, with its counterparts there: so what a host
    has summed leaves it once, by all its ranks at the same time. Everything else goes from rank to rank.
    """

    def __init__(
        self,
        network: NetworkThread,
        node: Node,
        here: OneHost,
        peers: Sequence[PeerId],
        hosts: Sequence[Sequence[int]],
        rank: int,
        *,
        timeout_s: float,
        setting: str,
    ) -> None:
        """``here``: the ranks of this host; ``hosts``: the ranks of each host; ``peers`` of all ranks on the network."""
        self._network, self._node, self._here = network, node, here
        self._rank, self._peers, self._hosts = rank, tuple(peers), hosts
        self._timeout_s, self._setting = timeout_s, setting
        self._own = next(ranks for ranks in hosts if rank in ranks)
        self._slices = min(map(len, hosts))
        self._count = itertools.count()
        self._column: Group | None = None
        self._everybody = network.call(self._make_groups())

    async def _make_groups(self) -> Group:
        place = self._own.index(self._rank)
        if place < self._slices:
            members = tuple(self._peers[ranks[place]] for ranks in self._hosts)
            name = f"slice/{place}"
            self._column = Group(self._node, members, members.index(self._node.peer), name, timeout_s=self._timeout_s)
        return Group(self._node, self._peers, self._rank, "everybody", timeout_s=self._timeout_s)

    def all_reduce(self, flat: Tensor, combine: Combine, what: str, *, root: int | None = None) -> None:
        tag = self._tag()
        result = flat if root is None or root == self._rank else flat.clone()
        self._here.all_reduce(result, combine, what)
        parts = [result[start:stop] for start, stop in bounds(result.numel(), self._slices)]
        place = self._own.index(self._rank)
        if self._column is not None and parts[place].numel():
            if combine is torch.add and dtype_of_torch(flat.dtype).kind in ("float", "int") and flat.element_size() > 1:
                self._call(all_reduce(self._column, TensorPayload.of(parts[place]), tag), what)
            else:
                self._combine(parts[place], place, combine, tag, what)
        # Ranks of a host beyond the number of slices have none.
        nothing = result.new_empty(0)
        gathered = [parts[index] if index < self._slices else nothing for index in range(len(self._own))]
        self._here.all_gather(gathered, gathered[place].clone(), what)

    def broadcast(self, flat: Tensor, root: int, what: str) -> None:
        self._call(broadcast(self._everybody, TensorPayload.of(as_bytes(flat)), self._tag(), root=root), what)

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor, what: str) -> None:
        self._exchange(dict.fromkeys(range(len(self._peers)), own), dict(enumerate(outputs)), self._tag(), what)

    def gather(self, outputs: Sequence[Tensor] | None, own: Tensor, root: int, what: str) -> None:
        self._exchange({root: own}, {} if outputs is None else dict(enumerate(outputs)), self._tag(), what)

    def scatter(self, output: Tensor, parts: Sequence[Tensor] | None, root: int, what: str) -> None:
        self._exchange({} if parts is None else dict(enumerate(parts)), {root: output}, self._tag(), what)

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], combine: Combine, what: str) -> None:
        sources = [torch.empty_like(output) for _ in self._peers]
        self._exchange(dict(enumerate(parts)), dict(enumerate(sources)), self._tag(), what)
        sum_into([output], sources, combine=combine)

    def all_to_all(self, outputs: Sequence[Tensor], parts: Sequence[Tensor], what: str) -> None:
        self._exchange(dict(enumerate(parts)), dict(enumerate(outputs)), self._tag(), what)

    def barrier(self, what: str) -> None:
        self._call(barrier(self._everybody, self._tag()), what)

    def send(self, to: int, tag: int, flat: Tensor, what: str) -> None:
        self._call(self._send(to, ("message", tag), flat), what)

    def receive(self, source: int, tag: int, flat: Tensor, what: str) -> None:
        into = TensorPayload.of(as_bytes(flat))
        self._call(self._node.receive(self._peers[source], ("message", tag), into=into), what)

    def waiting(self, source: int) -> bool:
        raise NotImplementedError("receiving from any rank is for groups of one host: name the rank")

    def close(self, error: BaseException | None = None) -> None:
        try:
            if error is None:
                self._network.call(self._node.finish(timeout=self._timeout_s))
        finally:
            self._network.call(self._node.close())
            self._network.close()
            self._here.close(error)

    def _combine(self, part: Tensor, place: int, combine: Combine, tag: Tag, what: str) -> None:
        """The slice's combination over all hosts, in their order."""
        counterparts = [ranks[place] for ranks in self._hosts]
        sources = {rank: torch.empty_like(part) for rank in counterparts}
        self._exchange(dict.fromkeys(counterparts, part), sources, tag, what)
        sum_into([part], [sources[rank] for rank in counterparts], combine=combine)

    def _exchange(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor], tag: Tag, what: str) -> None:
        """Send to some ranks, and receive from some."""
        if self._rank in into:
            into[self._rank].copy_(out[self._rank])
        self._call(self._exchange_others(out, into, tag), what)

    async def _exchange_others(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor], tag: Tag) -> None:
        async with asyncio.TaskGroup() as tasks:
            for rank, tensor in out.items():
                if rank != self._rank:
                    tasks.create_task(self._send(rank, tag, tensor))
            for rank, tensor in into.items():
                if rank != self._rank:
                    payload = TensorPayload.of(as_bytes(tensor))
                    tasks.create_task(self._node.receive(self._peers[rank], tag, into=payload))

    async def _send(self, to: int, tag: Tag, tensor: Tensor) -> None:
        sent = await self._node.send(self._peers[to], tag, TensorPayload.of(as_bytes(tensor)))
        await sent.wait_released()

    def _tag(self) -> Tag:
        """One an operation, the same on all ranks: all of them take one, also who has nothing to send."""
        return ("operation", next(self._count))

    def _call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        async def limited() -> T:
            async with in_time("a rank of another host", what, self._timeout_s, self._setting):
                return await work

        try:
            return self._network.call(limited())
        except (BaseExceptionGroup, TimeoutError, PeerLostError) as error:
            raise self._told(first_error(error), what) from None

    def _told(self, error: BaseException, what: str) -> BaseException:
        """In the group's words."""
        if isinstance(error, PeerLostError):
            return PeerLostError(error.peer, error.reason, waiting_for=what)
        if isinstance(error, TimeoutError):
            peer = error.peer if isinstance(error, PeerTimeoutError) else "a rank of another host"
            return PeerTimeoutError(peer, what, self._timeout_s, self._setting)
        return error


#: Checked here, so that a missing method shows when types are checked.
_IS_TRANSPORT: type[Transport] = SeveralHosts
