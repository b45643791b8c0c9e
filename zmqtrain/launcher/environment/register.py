"""Assigns the nodes that join to the hosts of the run. Sans-IO.

A file may list its hosts, and then each node is one of them: by a name that it gives, or else by its number, or else the first
host that is free. Without a list, the nodes that join are the hosts, in the order of their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.errors import UsageError
from zmqtrain.launcher.environment.node_description import NodeDescription
from zmqtrain.topology.hosts import LONGEST_NAME
from zmqtrain.topology.loopback import is_loopback
from zmqtrain.topology.schema import Host

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
#: An error names at most this many missing hosts.
MOST_NAMED = 8


class OccupiedError(UsageError):
    """Another node has this host's place already; if it leaves, a later attempt may succeed."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The result when all nodes have joined."""

    hosts: tuple[Host, ...]
    towards: dict[str, str]
    """The address of this machine for each host, by host name."""


class Register:
    """Keeps track of the nodes that have joined."""

    def __init__(self, hosts: Sequence[Host] | None, nodes: int | None) -> None:
        """``hosts``: those of the file, or ``None`` if it lists none. ``nodes``: the number of nodes in that case, if it is
        known."""
        self._hosts = None if hosts is None else {host.name: host for host in hosts}
        self._nodes = nodes
        self._here: dict[str, NodeDescription] = {}

    @property
    def expected(self) -> int | None:
        """The expected number of hosts; ``None``: not known yet."""
        return self._nodes if self._hosts is None else len(self._hosts)

    @property
    def is_complete(self) -> bool:
        """Whether all hosts have joined."""
        return len(self._here) == self.expected

    @property
    def here(self) -> tuple[str, ...]:
        """Names of the hosts that have joined."""
        return tuple(self._here)

    def missing(self) -> str:
        """The hosts that have not joined, in words."""
        if self._hosts is None:
            expected = self.expected
            return "nodes, whose number is not known" if expected is None else f"{expected - len(self._here)} nodes"
        names = [name for name in self._hosts if name not in self._here]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return ", ".join(names[:MOST_NAMED]) + more

    def enter(self, description: NodeDescription) -> str:
        """Add a node that joins. Returns the name of its host.

        Raises `OccupiedError` if that host has joined already, and `UsageError` if the run has no place for the node.
        """
        name = self._new_name(description) if self._hosts is None else self._listed(description, self._hosts)
        self._here[name] = description
        return name

    def leave(self, name: str) -> None:
        """Remove a node that has left; another one may take its place."""
        self._here.pop(name, None)

    def settle(self, seen: str | None = None) -> Settled:
        """The actual hosts, once all have joined. ``seen``: an address at which other machines have reached this one."""
        assert self.is_complete
        order = list(self._here) if self._hosts is None else list(self._hosts)
        if self._hosts is None:
            order.sort(key=lambda name: (self._here[name].rank is None, self._here[name].rank or 0))
        hosts = {name: self._host(name) for name in order}
        if seen is not None:
            # A node on the launcher's own machine, which has connected over the loopback interface.
            for name, host in hosts.items():
                if is_loopback(host.address):
                    hosts[name] = host.model_copy(update={"address": seen})
        return Settled(tuple(hosts.values()), {name: self._here[name].launcher for name in order})

    def _host(self, name: str) -> Host:
        description = self._here[name]
        host = Host(name=name) if self._hosts is None else self._hosts[name]
        given = "address" in host.model_fields_set and not is_loopback(host.address)
        address = description.address or (host.address if given else description.interface)
        slots = host.slots if "slots" in host.model_fields_set and host.slots else description.slots
        bind = description.bind or host.bind
        return host.model_copy(update={"address": address, "slots": slots, "bind": bind})

    def _listed(self, description: NodeDescription, hosts: dict[str, Host]) -> str:
        name = next((name for name in description.names if name in hosts), None)
        if name is None and description.rank is not None:
            if description.rank >= len(hosts):
                raise UsageError(
                    f"{description} has number {description.rank}, but the file lists {len(hosts)} hosts, numbered from 0"
                )
            name = list(hosts)[description.rank]
        if name is None:
            name = next((name for name in hosts if name not in self._here), None)
        if name is None:
            raise OccupiedError(f"there is no place for {description}: all {len(hosts)} hosts of the file have joined already")
        if name in self._here:
            raise OccupiedError(f"{name} has joined already ({self._here[name]}): give each node its own name in ZMQTRAIN_NAME")
        return name

    def _new_name(self, description: NodeDescription) -> str:
        if self._nodes is None:
            self._nodes = description.nodes
        if self._nodes is not None and len(self._here) >= self._nodes:
            raise OccupiedError(f"there is no place for {description}: all {self._nodes} nodes have joined already")
        if description.rank is not None:
            for name, other in self._here.items():
                if other.rank == description.rank:
                    raise OccupiedError(
                        f"number {description.rank} has joined already ({name}): give each node its own ZMQTRAIN_NODE_RANK"
                    )
        number = len(self._here) if description.rank is None else description.rank
        for wanted in (*description.names, description.machine, f"node{number}"):
            if _NAME.fullmatch(wanted) and len(wanted) <= LONGEST_NAME and wanted not in self._here:
                return wanted
        while f"node{number}" in self._here:
            number += 1
        return f"node{number}"
