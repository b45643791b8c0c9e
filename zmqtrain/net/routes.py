"""This machine's address on its way to another."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any


def own_address(resolved: Iterable[tuple[int, int, int, str, Any]]) -> str:
    """The address from which the kernel would send to the first of these to which there is a route. Nothing is sent.

    ``resolved``: what ``getaddrinfo`` gives for a name. Raises `OSError` if there is no route to any of them."""
    failed = OSError("it has no address")
    for family, kind, protocol, _, target in resolved:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)
            except OSError as error:
                failed = error
                continue
            return str(probe.getsockname()[0]).partition("%")[0]
    raise failed
