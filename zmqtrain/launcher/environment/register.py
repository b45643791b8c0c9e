"""Who is who: which node that comes is which host of the run. Sans-IO.

A file may list its hosts, and then each node is one of them: by a name that it gives, else by its number, else the first that
nobody is yet. Without a list, the nodes that come are the hosts, in the order of their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.errors import UsageError
from zmqtrain.launcher.environment.node_description import NodeDescription
from zmqtrain.topology.hosts import LONGEST_NAME, is_loopback
from zmqtrain.topology.schema import Host

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
#: Missing hosts that an error names.
MOST_NAMED = 8


class OccupiedError(UsageError):
    """Somebody else is this host already; it may go, and then another try does better."""


@dataclass(frozen=True, slots=True)
class Settled:
    """All nodes are there."""

    hosts: tuple[Host, ...]
    towards: dict[str, str]
    """Where each host reaches this machine."""


class Register:
    """Keeps the nodes that are here."""

    def __init__(self, hosts: Sequence[Host] | None, nodes: int | None) -> None:
        """``hosts``: those of the file, or ``None`` where it lists none. ``nodes``: how many then, if that is known."""
        self._hosts = None if hosts is None else {host.name: host for host in hosts}
        self._nodes = nodes
        self._here: dict[str, NodeDescription] = {}

    @property
    def expected(self) -> int | None:
        """How many hosts there will be; ``None``: nobody has said so yet."""
        return self._nodes if self._hosts is None else len(self._hosts)

    @property
    def is_complete(self) -> bool:
        """Whether all are here."""
        return len(self._here) == self.expected

    @property
    def here(self) -> tuple[str, ...]:
        """Names of the hosts that are here."""
        return tuple(self._here)

    def missing(self) -> str:
        """Those who are not here, in words."""
        if self._hosts is None:
            expected = self.expected
            return "nodes, whose number nobody has told" if expected is None else f"{expected - len(self._here)} nodes"
        names = [name for name in self._hosts if name not in self._here]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return ", ".join(names[:MOST_NAMED]) + more

    def enter(self, description: NodeDescription) -> str:
        """A node comes. Returns the host that it is.

        Raises `OccupiedError` where that is here already, and `UsageError` where the run has no place for it.
        """
        name = self._new_name(description) if self._hosts is None else self._listed(description, self._hosts)
        self._here[name] = description
        return name

    def leave(self, name: str) -> None:
        """The node is gone; another may come in its place."""
        self._here.pop(name, None)

    def settle(self, seen: str | None = None) -> Settled:
        """The hosts as they are, now that all are here. ``seen``: an address under which other machines have reached this one."""
        assert self.is_complete
        order = list(self._here) if self._hosts is None else list(self._hosts)
        if self._hosts is None:
            order.sort(key=lambda name: (self._here[name].rank is None, self._here[name].rank or 0))
        hosts = {name: self._host(name) for name in order}
        if seen is not None:
            # A node on the launcher's own machine, which has come over the loopback interface.
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
                    f"{description} is number {description.rank}, but the file lists {len(hosts)} hosts, counted from 0"
                )
            name = list(hosts)[description.rank]
        if name is None:
            name = next((name for name in hosts if name not in self._here), None)
        if name is None:
            raise OccupiedError(f"there is no place for {description}: all {len(hosts)} hosts of the file are here")
        if name in self._here:
            raise OccupiedError(f"{name} is here already ({self._here[name]}): tell each node its own name by ZMQTRAIN_NAME")
        return name

    def _new_name(self, description: NodeDescription) -> str:
        if self._nodes is None:
            self._nodes = description.nodes
        if self._nodes is not None and len(self._here) >= self._nodes:
            raise OccupiedError(f"there is no place for {description}: all {self._nodes} nodes are here")
        if description.rank is not None:
            for name, other in self._here.items():
                if other.rank == description.rank:
                    raise OccupiedError(
                        f"number {description.rank} is here already ({name}): give each node its own ZMQTRAIN_NODE_RANK"
                    )
        number = len(self._here) if description.rank is None else description.rank
        for wanted in (*description.names, description.machine, f"node{number}"):
            if _NAME.fullmatch(wanted) and len(wanted) <= LONGEST_NAME and wanted not in self._here:
                return wanted
        while f"node{number}" in self._here:
            number += 1
        return f"node{number}"
