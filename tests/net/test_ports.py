"""Which ports endpoints listen at."""

from __future__ import annotations

import socket

import pytest

from zmqtrain.errors import PortInUseError
from zmqtrain.net.address import split_address
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import open_zeromq


def free_range(count: int) -> tuple[int, int]:
    """So many neighbouring ports below those that the kernel hands out."""
    for first in range(20_000, 30_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first, first + count - 1
    raise AssertionError("no free ports")


async def test_a_range_is_kept_to_and_said_to_be_full() -> None:
    ports = free_range(5)
    settings = NetSettings(ports=ports)
    async with await open_zeromq("a", settings=settings) as one, await open_zeromq("b", settings=settings) as other:
        taken = [int(lane.rpartition(":")[2]) for node in (one, other) for lane in split_address(node.address)]
        assert len(set(taken)) == 4
        assert all(ports[0] <= port <= ports[1] for port in taken)
        with pytest.raises(PortInUseError, match=f"all ports from {ports[0]} to {ports[1]} are in use. Give .job. ports"):
            await open_zeromq("c", settings=settings)
    async with await open_zeromq("c", settings=settings):  # they are free again
        pass
