"""How the ranks of a process group find each other: through torch's store, before anything else."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from secrets import token_hex

from torch._C._distributed_c10d import PrefixStore, Store

from zmqtrain.arena import Arena, shared_memory_missing
from zmqtrain.c10d.one_host import OneHost
from zmqtrain.c10d.several_hosts import NetworkThread, SeveralHosts
from zmqtrain.c10d.transport import Transport
from zmqtrain.errors import PeerTimeoutError, UsageError
from zmqtrain.membership.environment import BIND, PORTS, ports_in
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import open_zeromq

SETTING = "timeout= of init_process_group() or new_group()"
#: The variable with the address at which other hosts find this rank; by default, that of the interface towards ``MASTER_ADDR``.
ADDRESS = "ZMQTRAIN_HOST"


def rendezvous(store: Store, rank: int, names: Sequence[str], timeout: timedelta, *, host: str | None = None) -> Transport:
    """Meet the other ranks. Raises `PeerTimeoutError` that names a missing rank, and `UsageError` if the backend cannot work here.

    ``host``: ranks that pass the same value share memory; by default found automatically.
    """
    missing = shared_memory_missing()
    if missing is not None:
        raise UsageError(f'the "zmq" backend needs shared memory, but {missing}')
    # A program may destroy its group and make another one in the same store, where what the first one wrote is still to be found.
    store = PrefixStore(f"group-{store.add(f'made/{rank}', 1)}", store)
    store.set(f"host/{rank}", host or this_host())
    ranks_of: dict[str, list[int]] = {}
    for other, name in enumerate(names):
        ranks_of.setdefault(_get(store, f"host/{other}", name, timeout), []).append(other)
    hosts = list(ranks_of.values())
    here = next(ranks for ranks in hosts if rank in ranks)
    key = f"memory/{here[0]}"
    if rank == here[0]:
        region = Arena.create(len(here))
        store.set(key, region.path)
        arena = Arena(region, 0)
    else:
        arena = Arena.join(_get(store, key, names[here[0]], timeout), here.index(rank))
    timeout_s = timeout.total_seconds()
    memory = OneHost(arena, here.index(rank), [names[other] for other in here], timeout_s=timeout_s, setting=SETTING)
    if len(hosts) == 1:
        return memory
    if rank == 0:
        store.set("token", token_hex(16))
    settings = settings_here(_get(store, "token", names[0], timeout), timeout_s)
    network = NetworkThread()
    try:
        node = network.call(_open(names[rank], settings))
        store.set(f"address/{rank}", node.address)
        for other, name in enumerate(names):
            network.loop.call_soon_threadsafe(node.add_peer, name, _get(store, f"address/{other}", name, timeout))
        return SeveralHosts(network, node, memory, names, hosts, rank, timeout_s=timeout_s, setting=SETTING)
    except BaseException:
        network.close()
        raise


async def _open(name: str, settings: NetSettings) -> Node:
    return await open_zeromq(name, settings=settings)


def settings_here(token: str, timeout_s: float) -> NetSettings:
    """Where this rank listens, and where others find it, which differ if addresses are translated on the way (NAT)."""
    address = listening_address()
    bind = os.environ.get(BIND) or (address if _is_own(address) else _everywhere())
    return NetSettings(
        token=token,
        host=bind,
        advertise="" if bind == address else address,
        ports=ports_in(os.environ.get(PORTS, "")),
        greet_s=timeout_s,
    )


def listening_address() -> str:
    """The address at which other hosts find this rank."""
    given = os.environ.get(ADDRESS)
    if given:
        return given
    try:
        found = socket.getaddrinfo(os.environ.get("MASTER_ADDR", "127.0.0.1"), 9, type=socket.SOCK_DGRAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, target in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)  # sends nothing: it only looks up the route
            except OSError:
                continue
            return str(probe.getsockname()[0]).partition("%")[0]
    return "127.0.0.1"


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


def _get(store: Store, key: str, name: str, timeout: timedelta) -> str:
    try:
        store.wait([key], timeout)
    except RuntimeError as error:  # torch's stores raise DistStoreError, a subclass
        raise PeerTimeoutError(name, "it to join the process group", timeout.total_seconds(), SETTING) from error
    content: bytes = store.get(key)
    return content.decode()


def this_host() -> str:
    """An identifier that is equal for processes that can share memory: the machine, and its process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
