"""What a process sends in a collective: messages and bytes. Pure.

An all-gather and a reduce-scatter send all parts but one, the smallest volume there is and the one that the cost model counts; an
all-reduce what its algorithm for that size does. Empty parts cost no message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zmqtrain.collectives.operations import sent_by_all_reduce
from zmqtrain.parallel.communicator import Label


@dataclass(frozen=True, slots=True)
class Sent:
    """Numbers of messages and bytes that a process sends."""

    messages: int = 0
    nbytes: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.messages + other.messages, self.nbytes + other.nbytes)

    def __mul__(self, times: int) -> Sent:
        return Sent(self.messages * times, self.nbytes * times)

    def __bool__(self) -> bool:
        return self.messages > 0


#: What a process sends for a layer, by label; labels for which nothing is sent are left out.
Traffic: TypeAlias = dict[Label, Sent]


def messages(sizes: Iterable[int]) -> Sent:
    """Messages of these sizes in bytes."""
    sizes = [size for size in sizes if size]
    return Sent(len(sizes), sum(sizes))


def all_gather(sizes: Sequence[int], rank: int) -> Sent:
    """Parts of ``sizes`` bytes: a member sends on every part but the next member's."""
    return messages(size for member, size in enumerate(sizes) if member != (rank + 1) % len(sizes))


def reduce_scatter(sizes: Sequence[int], rank: int) -> Sent:
    """Parts of ``sizes`` bytes: a member sends every part but its own."""
    return messages(size for member, size in enumerate(sizes) if member != rank)


def all_reduce(numel: int, itemsize: int, size: int, rank: int) -> Sent:
    """A tensor of ``numel`` elements."""
    return Sent(*sent_by_all_reduce(numel, itemsize, size, rank))


def total(parts: Iterable[Mapping[Label, Sent]]) -> Traffic:
    """The traffic of several layers."""
    sums: Traffic = {}
    for part in parts:
        for label, sent in part.items():
            if sent:
                sums[label] = sums.get(label, Sent()) + sent
    return sums
