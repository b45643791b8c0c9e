"""Files that mean other machines, but whose engine starts everything on this one."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator

import psutil

from zmqtrain.errors import UsageError
from zmqtrain.topology.schema import Host, Topology

#: A message names at most this many hosts.
_MOST_NAMED = 4
#: What the local engine cannot give to a host.
_OF_MACHINES = ("python", "folder", "ssh")
_PLAIN = Host(name="plain")
_REMEDY = 'Set [engine] kind = "ssh" to start processes on other machines'


def require_here(topology: Topology) -> None:
    """Raise `UsageError` if the file means other machines than this one, and is about to be run by the local engine.

    So it is if the file names no engine, and hosts have addresses of other machines; and if hosts have settings that only engines
    for other machines heed.
    """
    if topology.engine.kind != "local":
        return
    for host in topology.hosts:
        ignored = [name for name in _OF_MACHINES if getattr(host, name) != getattr(_PLAIN, name)]
        if ignored:
            raise UsageError(
                f"host {host.name} has {_both(ignored)}, which the local engine would ignore: it starts all processes on this "
                f"machine, with this Python, in this folder. {_REMEDY}, or remove {_both(ignored)}"
            )
    if "kind" in topology.engine.model_fields_set:
        return
    here = _addresses()
    others = [host for host in topology.hosts if not (host.local or host.address in here)]
    if others:
        named = ", ".join(f"{host.name} ({host.address})" for host in others[:_MOST_NAMED])
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        raise UsageError(
            f"{named}{more}: not this machine's address, and the file names no engine, so all would run on this machine. "
            f'{_REMEDY}, or kind = "local" to have them all here; --emulate also emulates their network'
        )


def _addresses() -> Collection[str]:
    """This machine's addresses, and its name."""
    return {*_numeric(), socket.gethostname()}


def _numeric() -> Iterator[str]:
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            yield address.address.partition("%")[0]


def _both(names: Collection[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)
