"""How the ranks of a process group find each other: through torch's store, before anything else."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from torch._C._distributed_c10d import Store

from zmqtrain.arena import Arena, shared_memory_missing
from zmqtrain.c10d.network_thread import NetworkThread
from zmqtrain.c10d.notices import SETTING, Notices
from zmqtrain.c10d.one_host import OneHost
from zmqtrain.c10d.several_hosts import ACK_S, CHUNK_BYTES, EAGER_BYTES, SeveralHosts
from zmqtrain.c10d.transport import RankTransport
from zmqtrain.errors import UsageError
from zmqtrain.host.team import LOOK_S
from zmqtrain.membership.environment import BIND, ENCRYPTED_IO_THREADS, PORTS, ports_in
from zmqtrain.membership.secret import read_token
from zmqtrain.net.blocking import BlockingSockets
from zmqtrain.net.curve import Identity
from zmqtrain.net.node import Node
from zmqtrain.net.routes import own_address
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import ZeroMQTransport
from zmqtrain.topology.loopback import is_loopback

#: The variable with the address at which other hosts find this rank; by default, that of the interface towards the store.
ADDRESS = "ZMQTRAIN_HOST"
#: The variable that allows plain text between hosts: ``disabled``, as of ``[job] transport_encryption``.
ENCRYPTION = "ZMQTRAIN_TRANSPORT_ENCRYPTION"
#: A rank whose process has ended is lost so many seconds after the last message of it: nobody takes its place. One that leaves in
#: good order says so before.
GONE_S = 0.3
LOOPBACK = "127.0.0.1"
#: An address of no machine (RFC 5737), to ask for the interface of the default route.
ELSEWHERE = "192.0.2.1"


def rendezvous(store: Store, rank: int, names: Sequence[str], timeout: timedelta, *, host: str | None = None) -> RankTransport:
    """Meet the other ranks. Raises `PeerTimeoutError` that names a missing rank, `RunTokenError` that names one with another token,
    and `UsageError` if the backend cannot work here.

    ``host``: ranks that pass the same value share memory; by default found automatically.
    """
    missing = shared_memory_missing()
    if missing is not None:
        raise UsageError(f'the "zmq" backend needs shared memory, but {missing}')
    notices = Notices(store, rank, names, timeout, read_token(os.environ))
    found = notices.meet(host=host or this_host(), encryption=encryption_wanted())
    ranks_of: dict[str, list[int]] = {}
    for other, told in enumerate(found):
        ranks_of.setdefault(told["host"], []).append(other)
    hosts = list(ranks_of.values())
    here = next(ranks for ranks in hosts if rank in ranks)
    encrypted = encrypts(found, names)
    if rank == here[0]:
        region = Arena.create(len(here))
        notices.tell("memory", region.path)
        arena = Arena(region, 0)
    else:
        arena = Arena.join(notices.hear("memory", here[0]), here.index(rank))
    timeout_s = timeout.total_seconds()
    memory = OneHost(arena, here.index(rank), [names[other] for other in here], timeout_s=timeout_s, setting=SETTING)
    if len(hosts) == 1:
        return memory
    network = NetworkThread()
    try:
        settings = settings_here(notices.run_token, timeout_s, store, encrypted=encrypted)
        settings = replace(settings, ack_s=ACK_S, ack_with_bytes=EAGER_BYTES)
        if not encrypted:
            settings = replace(settings, chunk_bytes=CHUNK_BYTES)
        node, sockets = network.call(_open(names[rank], settings))
        notices.tell("address", node.address)
        addresses = []
        for other, name in enumerate(names):
            addresses.append(notices.hear("address", other))
            network.loop.call_soon_threadsafe(node.add_peer, name, addresses[other])
        return SeveralHosts(network, node, sockets, memory, names, addresses, hosts, rank, timeout_s=timeout_s, setting=SETTING)
    except BaseException:
        network.close()
        raise


async def _open(name: str, settings: NetSettings) -> tuple[Node, BlockingSockets]:
    transport = ZeroMQTransport(settings)
    try:
        return Node(name, settings, transport), transport.blocking(name, LOOK_S)
    except BaseException:
        await transport.close()
        raise


def encryption_wanted() -> Literal["required", "disabled"]:
    """Whether this rank encrypts connections to other hosts: always, unless the environment says otherwise. Raises `UsageError`."""
    match os.environ.get(ENCRYPTION, ""):
        case "" | "required":
            return "required"
        case "disabled":
            return "disabled"
        case other:
            raise UsageError(f'{ENCRYPTION} is {other!r}; it must be "required", as without it, or "disabled"')


def encrypts(found: Sequence[Mapping[str, str]], names: Sequence[str]) -> bool:
    """Whether the ranks encrypt their connections: not within one host. Raises `UsageError`, on all of them, if they differ.

    ``found``: each rank's ``host`` and ``encryption``. ``names``: of the ranks.
    """
    if len({told["host"] for told in found}) == 1:
        return False
    for name, told in zip(names, found, strict=True):
        if told["encryption"] != found[0]["encryption"]:
            raise UsageError(
                f"transport encryption is {told['encryption']} for {name}, but {found[0]['encryption']} for {names[0]}: set "
                f"{ENCRYPTION} alike in all processes"
            )
    return found[0]["encryption"] == "required"


def settings_here(token: str, timeout_s: float, store: Store | None = None, *, encrypted: bool) -> NetSettings:
    """Where this rank listens, and where others find it, which differ if addresses are translated on the way (NAT).

    ``store``: where all ranks have met. ``encrypted``: with new keys. It admits only those who are added as peers.
    """
    address = listening_address(store)
    bind = os.environ.get(BIND) or (address if _is_own(address) else _everywhere())
    return NetSettings(
        token=token,
        host=bind,
        advertise="" if bind == address else address,
        ports=ports_in(os.environ.get(PORTS, "")),
        greet_s=timeout_s,
        gone_s=GONE_S,
        identity=Identity() if encrypted else None,
        io_threads=ENCRYPTED_IO_THREADS if encrypted else 1,
    )


def listening_address(store: Store | None = None) -> str:
    """The address at which other hosts find this rank: that of the interface that leads to ``store``, or to ``MASTER_ADDR``."""
    given = os.environ.get(ADDRESS)
    if given:
        return given
    meeting = _host_of(store) or os.environ.get("MASTER_ADDR", LOOPBACK)
    address = _route_to(meeting) or LOOPBACK
    if is_loopback(address) and not is_loopback(meeting):
        # The name of this machine, which it often gives a loopback address, in /etc/hosts. Others have come by another way.
        return _route_to(ELSEWHERE) or address
    return address


def _host_of(store: Any) -> str:
    """Where a `torch.distributed.TCPStore` is, as this process was told; empty for other stores."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return str(getattr(store, "host", ""))


def _route_to(name: str) -> str:
    """The address of the interface that leads there; empty if none does."""
    try:
        return own_address(socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM))
    except OSError:
        return ""


def _is_own(address: str) -> bool:
    """Whether this machine can listen at the address. Names do not count: ZeroMQ does not bind to names."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            socket.inet_pton(probe.family, address)
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _everywhere() -> str:
    return "::" if _is_own("::") else "0.0.0.0"


def this_host() -> str:
    """An identifier that is equal for processes that can share memory: the machine, and its process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
