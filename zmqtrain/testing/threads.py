"""Divided layers in one process: each rank is a thread, the network a table, and every message is counted."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from zmqtrain.collectives.operations import sent_by_all_reduce
from zmqtrain.errors import PeerLostError, PeerTimeoutError, ProtocolError
from zmqtrain.parallel.communicator import Communicator, Expected, Label, Pending
from zmqtrain.parallel.turns import handing_over, torch_reads_so

T = TypeVar("T")
#: A rank that waits longer than this, in seconds, would hang.
TIMEOUT_S = 20.0


@dataclass(slots=True)
class Traffic:
    """What was sent, by label: messages, and bytes of tensors."""

    messages: Counter[Label] = field(default_factory=Counter)
    nbytes: Counter[Label] = field(default_factory=Counter)

    def count(self, label: Label, nbytes: int, messages: int = 1) -> None:
        """Count something that was sent."""
        if nbytes:
            self.messages[label] += messages
            self.nbytes[label] += nbytes


class ThreadWorld:
    """The ranks of one process. ``traffic[rank]`` counts what each has sent: the same as with the collectives of real endpoints."""

    def __init__(self, size: int, timeout_s: float | None = TIMEOUT_S) -> None:
        self.size, self._timeout_s = size, timeout_s
        self.traffic = [Traffic() for _ in range(size)]
        self.failed: BaseException | None = None
        self.failed_rank = 0
        self._arrived = threading.Condition()
        self._boxes: defaultdict[tuple[Any, ...], deque[Tensor]] = defaultdict(deque)

    def post(self, key: tuple[Any, ...], tensor: Tensor) -> None:
        """Send a message: the receiver gets its own copy, as if it had crossed a network."""
        with self._arrived:
            self._boxes[key].append(tensor.detach().clone())
            self._arrived.notify_all()

    def take(self, key: tuple[Any, ...], source: int, label: Label) -> Tensor:
        """The next message with this key."""
        with handing_over(), self._arrived:
            if not self._arrived.wait_for(lambda: self._boxes.get(key) or self.failed is not None, self._timeout_s):
                assert self._timeout_s is not None
                raise PeerTimeoutError(f"rank {source}", str(label), self._timeout_s)
            if not self._boxes.get(key):
                raise PeerLostError(f"rank {self.failed_rank}", f"it failed: {self.failed}", waiting_for=str(label))
            return self._boxes[key].popleft()

    def fail(self, rank: int, error: BaseException) -> None:
        """A rank has ended with an error: end all waits for it."""
        with self._arrived:
            if self.failed is None:
                self.failed, self.failed_rank = error, rank
            self._arrived.notify_all()


class ThreadFabric:
    """One rank's `zmqtrain.parallel.communicator.Fabric`."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank = world, rank
        self._communicators: dict[tuple[int, ...], ThreadCommunicator] = {}

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def traffic(self) -> Traffic:
        """Numbers of messages and bytes that this rank has sent, by label."""
        return self.world.traffic[self.rank]

    def among(self, members: tuple[int, ...]) -> Communicator:
        if members not in self._communicators:
            self._communicators[members] = ThreadCommunicator(self.world, members, members.index(self.rank))
        return self._communicators[members]


class _Later:
    def __init__(self, finish: Callable[[], list[Tensor]]) -> None:
        self._finish: Callable[[], list[Tensor]] | None = finish

    def wait(self) -> list[Tensor]:
        assert self._finish is not None, "waited for twice"
        finish, self._finish = self._finish, None
        return finish()


class ThreadCommunicator:
    """Some ranks of a `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, members: tuple[int, ...], rank: int) -> None:
        self.rank, self.size = rank, len(members)
        self._world, self._members = world, members
        self._operation = 0

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Expected], label: Label) -> Pending:
        for to, tensor in sends:
            if tensor.numel():
                self._count(label, tensor.nbytes)
                self._world.post(self._key(self.rank, to, label), tensor)

        def finish() -> list[Tensor]:
            return [self._receive(expected, label) for expected in receives]

        return _Later(finish)

    def all_gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]], label: Label) -> Pending:
        if tuple(part.shape) != tuple(shapes[self.rank]):
            raise ProtocolError(
                f"{label}: this rank's part has shape {tuple(part.shape)}, but all others expect {shapes[self.rank]}"
            )
        operation = self._begin(label, [part] * self.size)
        for hop in range(self.size - 1):  # a ring sends on every part except that of the next member
            shape = shapes[(self.rank - hop) % self.size]
            self._count(label, math.prod(shape) * part.element_size())

        def finish() -> list[Tensor]:
            return self._gather(operation, shapes, label)

        return _Later(finish)

    def all_reduce(self, tensor: Tensor, label: Label) -> Pending:
        operation = self._begin(label, [tensor] * self.size)
        messages, nbytes = sent_by_all_reduce(tensor.numel(), tensor.element_size(), self.size, self.rank)
        self._count(label, nbytes, messages)

        def finish() -> list[Tensor]:
            return [_sum(self._gather(operation, [tuple(tensor.shape)] * self.size, label))]

        return _Later(finish)

    def reduce_scatter(self, parts: Sequence[Tensor], label: Label) -> Pending:
        operation = self._begin(label, parts)
        for hop in range(1, self.size):
            self._count(label, parts[(self.rank - hop) % self.size].nbytes)
        shape = tuple(parts[self.rank].shape)

        def finish() -> list[Tensor]:
            return [_sum(self._gather(operation, [shape] * self.size, label))]

        return _Later(finish)

    def _begin(self, label: Label, parts: Sequence[Tensor]) -> int:
        self._operation += 1
        for to, part in enumerate(parts):
            self._world.post((*self._key(self.rank, to, label), self._operation), part)
        return self._operation

    def _gather(self, operation: int, shapes: Sequence[tuple[int, ...]], label: Label) -> list[Tensor]:
        found = []
        for source, shape in enumerate(shapes):
            tensor = self._world.take((*self._key(source, self.rank, label), operation), self._members[source], label)
            if tuple(tensor.shape) != tuple(shape):
                raise ProtocolError(f"{label}: member {source} sent shape {tuple(tensor.shape)}, but {tuple(shape)} was expected")
            found.append(tensor)
        return found

    def _receive(self, expected: Expected, label: Label) -> Tensor:
        if 0 in expected.shape:
            return torch.empty(expected.shape, dtype=expected.dtype)
        key = self._key(expected.source, self.rank, label)
        tensor = self._world.take(key, self._members[expected.source], label)
        if tuple(tensor.shape) != tuple(expected.shape) or tensor.dtype != expected.dtype:
            raise ProtocolError(
                f"{label}: member {expected.source} sent {tuple(tensor.shape)} {tensor.dtype}, but {expected} was expected"
            )
        return tensor

    def _key(self, source: int, to: int, label: Label) -> tuple[Any, ...]:
        return (self._members, source, to, label)

    def _count(self, label: Label, nbytes: int, messages: int = 1) -> None:
        self._world.traffic[self._members[self.rank]].count(label, nbytes, messages)


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def run_ranks(
    size: int, function: Callable[[ThreadFabric], T], *, timeout_s: float | None = TIMEOUT_S
) -> tuple[list[T], ThreadWorld]:
    """Call ``function(fabric)`` on ``size`` ranks, each in a thread of its own. Returns the results in order of ranks, and the
    world. ``timeout_s``: how long a rank waits for a message; ``None``: until it comes, or a rank fails.

    Raises the error of the rank that failed first.
    """
    world = ThreadWorld(size, timeout_s)
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadFabric(world, rank))
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            world.fail(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    with torch_reads_so():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if world.failed is not None:
        raise world.failed
    return [results[rank] for rank in range(size)], world
