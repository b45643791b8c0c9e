"""Which of this machine's addresses another machine can reach it at."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from zmqtrain.errors import SshError
from zmqtrain.topology.schema import Host


async def addresses_towards(hosts: Sequence[Host], given: str | None) -> dict[str, str]:
    """Where each host, by its name, reaches this machine: at the address that is ``given``, or the one on the way to the host.

    Raises `SshError` as `address_towards`."""
    if given is not None:
        return {host.name: given for host in hosts}
    found = await asyncio.gather(*(address_towards(host.name, host.address) for host in hosts))
    return {host.name: address for host, address in zip(hosts, found, strict=True)}


async def address_towards(host: str, address: str) -> str:
    """This machine's own address on the way to another: what the kernel would send from. Sends nothing.

    Raises `SshError` for the ``host`` whose ``address`` is unknown, or has no way to it.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        what = f"its address {address} is unknown here ({error.strerror})"
        raise SshError(host, what, "mend it in [[hosts]]", lasting=True) from error
    why = ""
    for family, kind, protocol, _, target in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)
            except OSError as error:
                why = str(error.strerror)
                continue
            return str(probe.getsockname()[0]).partition("%")[0]
    raise SshError(host, f"there is no way to its address {address} from here ({why})", "mend it in [[hosts]], or the network")


def listening_address(addresses: Iterable[str]) -> str:
    """Where to listen for those that reach this machine at these addresses: at all of its own, of both families where need be."""
    return "::" if any(not _is_ipv4(address) for address in addresses) and has_ipv6() else "0.0.0.0"


def _is_ipv4(address: str) -> bool:
    try:
        return ip_address(address).version == 4
    except ValueError:
        return False  # a name, which may mean either


def has_ipv6() -> bool:
    """Whether this machine can listen at IPv6 addresses."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def endpoint_at(address: str, endpoint: str) -> str:
    """An endpoint's address (``tcp://HOST:PORTS``), with another host in it."""
    host = f"[{address}]" if ":" in address else address
    return f"tcp://{host}:{endpoint.rpartition(':')[2]}"
