"""Whether anybody listens at an address."""

from __future__ import annotations

import asyncio
import socket

#: How long a host may take to answer. One that has vanished does not.
PATIENCE_S = 3.0


async def nobody_listens(address: str) -> bool:
    """Whether the host at ``tcp://HOST:PORT`` refuses to connect: it is there, and has no process with this port.

    False if the connection is made, and if the host does not answer, or cannot be reached.
    """
    loop = asyncio.get_running_loop()
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(PATIENCE_S):
            places = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            for family, kind, _, _, place in places:
                with socket.socket(family, kind | socket.SOCK_NONBLOCK) as caller:
                    try:
                        await loop.sock_connect(caller, place)
                    except ConnectionRefusedError:
                        continue
                    return False
            return bool(places)
    except OSError:  # a `TimeoutError`, too
        return False
