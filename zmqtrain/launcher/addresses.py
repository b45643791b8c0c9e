"""The addresses at which other machines can reach this one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from zmqtrain.errors import SshError
from zmqtrain.net.routes import own_address
from zmqtrain.topology.schema import Host


async def addresses_towards(hosts: Sequence[Host], given: str | None) -> dict[str, str]:
    """The address at which each host reaches this machine, by host name: ``given``, or the local address of the route to the host.

    Raises `SshError` like `address_towards`."""
    if given is not None:
        return {host.name: given for host in hosts}
    found = await asyncio.gather(*(address_towards(host.name, host.address) for host in hosts))
    return {host.name: address for host, address in zip(hosts, found, strict=True)}


async def address_towards(host: str, address: str) -> str:
    """This machine's address on the route to another, from which the kernel would send. Nothing is sent.

    Raises `SshError` if the ``address`` of ``host`` is unknown, or if there is no route to it.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        what = f"its address {address} cannot be resolved here ({error.strerror})"
        raise SshError(host, what, "correct it in [[hosts]]", lasting=True) from error
    try:
        return own_address(found)
    except OSError as error:
        what = f"there is no route to its address {address} from here ({error.strerror})"
        raise SshError(host, what, "correct it in [[hosts]], or repair the network") from error


def listening_address(addresses: Iterable[str]) -> str:
    """Where to listen so that this machine is reached at ``addresses``: at all of its addresses, of both families if necessary."""
    return "::" if any(not _is_ipv4(address) for address in addresses) and has_ipv6() else "0.0.0.0"


def _is_ipv4(address: str) -> bool:
    try:
        return ip_address(address).version == 4
    except ValueError:
        return False  # a name, which may resolve to either family


def has_ipv6() -> bool:
    """Whether this machine can listen on IPv6 addresses."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def endpoint_at(address: str, endpoint: str) -> str:
    """An endpoint's address (``tcp://HOST:PORTS``), with ``address`` as its host."""
    host = f"[{address}]" if ":" in address else address
    return f"tcp://{host}:{endpoint.rpartition(':')[2]}"
