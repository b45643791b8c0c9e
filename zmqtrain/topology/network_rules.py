"""The rules of ``[network]`` that involve several fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zmqtrain.topology.broken_rule import BrokenRule, rule
from zmqtrain.topology.known_hosts import KnownHosts
from zmqtrain.topology.network import ANY
from zmqtrain.topology.ranges import expand

if TYPE_CHECKING:
    from zmqtrain.topology.network import Network


def network_rules(network: Network, known: KnownHosts) -> Iterator[BrokenRule]:
    """All rules of ``[network]`` that the file breaks."""
    yield from _hosts(network, known)
    yield from _racks(network, known)
    yield from _links(network, known)


def _hosts(network: Network, known: KnownHosts) -> Iterator[BrokenRule]:
    seen: dict[str, int] = {}
    for index, host in enumerate(network.hosts):
        path = ("network", "hosts", index, "name")
        if known.missing(host.name) is not None:
            yield from known.broken(host.name, path)
            continue
        names = expand(host.name)
        twice = next((name for name in names if name in seen), None)
        if twice is not None:
            yield rule(
                f"{twice} is in network.hosts[{seen[twice]}] already: put all settings of a host in one entry",
                path,
                ("network", "hosts", seen[twice], "name"),
            )
        for name in names:
            seen.setdefault(name, index)


def _racks(network: Network, known: KnownHosts) -> Iterator[BrokenRule]:
    rack_of: dict[str, int] = {}
    named: dict[str, int] = {}
    for index, rack in enumerate(network.racks):
        if rack.name in named:
            yield rule(
                f"rack {named[rack.name]} has the same name: give each rack a name of its own",
                ("network", "racks", index, "name"),
                ("network", "racks", named[rack.name], "name"),
            )
        named.setdefault(rack.name, index)
        for number, text in enumerate(rack.hosts):
            path = ("network", "racks", index, "hosts", number)
            if known.missing(text) is not None:
                yield from known.broken(text, path)
                continue
            names = expand(text)
            twice = next((name for name in names if name in rack_of), None)
            if twice is not None:
                where = "twice in this rack" if rack_of[twice] == index else f"in rack {network.racks[rack_of[twice]].name}"
                yield rule(
                    f"{twice} is {where} already: a host can be in one rack only",
                    path,
                    ("network", "racks", rack_of[twice], "hosts"),
                )
            for name in names:
                rack_of.setdefault(name, index)


def _links(network: Network, known: KnownHosts) -> Iterator[BrokenRule]:
    for index, link in enumerate(network.links):
        path = ("network", "links", index)
        for key, text in (("from", link.source), ("to", link.target)):
            if text != ANY:
                yield from known.broken(text, (*path, key))
        if link.source == link.target == ANY:
            yield rule("means all links: set these values in [network] itself", path)
        elif link.source == link.target and len(expand(link.source)) == 1:
            yield rule(
                "is also the host that messages come from: for processes of one host, set local_latency and local_bandwidth",
                (*path, "to"),
                (*path, "from"),
            )
