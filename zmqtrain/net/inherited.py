"""Forked processes close the listening sockets and the accepted connections that they inherit.

A connection ends when the last process that has it does. If a process was killed, but one that it had forked lived on (a worker of
a DataLoader), its peers would take it for alive until they had heard no heartbeat for long enough. (A process that runs another
program has none of them anyway: ZeroMQ's sockets are closed on exec.)
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter

#: Where the kernel shows this process's open files (Linux).
_OPEN_FILES = "/proc/self/fd"
#: How a socket for both IP versions writes an IPv4 address.
_IPV4_AS_IPV6 = "::ffff:"
#: What listens there accepts connections to every address.
_EVERYWHERE = ("::", "0.0.0.0")
_PLACES: Counter[tuple[str, int]] = Counter()


def close_in_children(endpoint: str) -> None:
    """Processes that are forked from now on close what listens at ``endpoint``, ``tcp://HOST:PORT`` in figures, and what it has
    accepted."""
    _PLACES[_place(endpoint)] += 1


def leave_to_children(endpoint: str) -> None:
    """Take back `close_in_children`: nothing of ZeroMQ listens there any more."""
    _PLACES[_place(endpoint)] -= 1


def _in_child() -> None:
    places = {place for place, count in _PLACES.items() if count > 0}
    _PLACES.clear()
    if not places:
        return
    try:
        files = [int(name) for name in os.listdir(_OPEN_FILES)]
    except OSError:  # there is no such folder: another system, or a sandbox
        return
    for file in files:
        with contextlib.suppress(OSError):  # no socket
            found = socket.socket(fileno=file)
            if _is_at(found, places):
                found.close()
            else:
                found.detach()


def _is_at(found: socket.socket, places: set[tuple[str, int]]) -> bool:
    if found.type != socket.SOCK_STREAM or found.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    host, port = found.getsockname()[:2]
    return any((each, port) in places for each in (_plain(host), *_EVERYWHERE))


def _place(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    return host.removeprefix(_IPV4_AS_IPV6)


os.register_at_fork(after_in_child=_in_child)
