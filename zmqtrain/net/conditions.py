"""What changes in an emulated run while it goes on: links that are cut, slow links, slow computing.

It is in a file that all processes of the run map, so that a change reaches each of them at once, whatever state the network is in.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from zmqtrain.net.endpoint import PeerId

_BYTES = 8


class Conditions:
    """The conditions of one run. Only the launcher changes them. A value is a float64, which is read and written as a whole."""

    def __init__(self, path: Path, host_of: Mapping[PeerId, str]) -> None:
        """Map the file that `create` has made for the same ``host_of``: the host of each process."""
        self._peers = {peer: number for number, peer in enumerate(host_of)}
        self._hosts = {host: number for number, host in enumerate(dict.fromkeys(host_of.values()))}
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(file, _size(host_of))
        finally:
            os.close(file)
        self._values = memoryview(self._memory).cast("d")

    @classmethod
    def create(cls, path: Path, host_of: Mapping[PeerId, str]) -> Conditions:
        """Make the file: nothing is slow, and no link is cut."""
        path.write_bytes(bytes(_size(host_of)))
        conditions = cls(path, host_of)
        for number in range(2 * len(host_of)):
            conditions._values[number] = 1.0
        return conditions

    def slowdown(self, peer: PeerId) -> float:
        """The factor on the time that modelled computing takes there."""
        return self._values[self._peers[peer]]

    def delay(self, peer: PeerId) -> float:
        """The factor on the latency of what it sends."""
        return self._values[len(self._peers) + self._peers[peer]]

    def cut(self, source: str, target: str) -> bool:
        """Whether nothing gets from one host to the other."""
        return self._values[self._way(source, target)] > 0

    def silent(self, one: str, other: str) -> bool:
        """Whether no connection between these hosts can last: it needs both directions."""
        return self.cut(one, other) or self.cut(other, one)

    def slow_down(self, peers: Sequence[PeerId], factor: float) -> None:
        """Multiply their `slowdown`."""
        for peer in peers:
            self._values[self._peers[peer]] *= factor

    def delay_more(self, peers: Sequence[PeerId], factor: float) -> None:
        """Multiply their `delay`."""
        for peer in peers:
            self._values[len(self._peers) + self._peers[peer]] *= factor

    def part(self, source: str, target: str, number: int) -> None:
        """Add ``number`` to the partitions on the way from one host to the other."""
        self._values[self._way(source, target)] += number

    def close(self) -> None:
        """Unmap the file."""
        self._values.release()
        self._memory.close()

    def _way(self, source: str, target: str) -> int:
        return 2 * len(self._peers) + self._hosts[source] * len(self._hosts) + self._hosts[target]


def _size(host_of: Mapping[PeerId, str]) -> int:
    return _BYTES * (2 * len(host_of) + len(set(host_of.values())) ** 2)
