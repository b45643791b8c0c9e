"""How many workers there are, and in which groups, if the file does not say: all hosts are used. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from zmqtrain.topology.compute import Compute
    from zmqtrain.topology.hosts import Host
    from zmqtrain.topology.schema import Topology

#: The fields of ``[compute]`` that follow from the hosts if the file leaves them out.
BY_HOSTS = ("groups", "group_size", "parts")
#: Exchanges that need several groups: a single group would have no peer to exchange with.
_AMONG_GROUPS = ("gossip", "averaging")


def by_hosts(compute: Compute) -> bool:
    """Whether the hosts decide how many workers there are: the file gives neither ``groups`` nor ``group_size``, or leaves the
    number of groups to the tuner."""
    given = compute.model_fields_set
    return "group_size" not in given and ("groups" not in given or compute.auto_groups)


def workers_of(host: Host, device: str) -> int:
    """The number of workers on a host: one for each device, up to its slots; or one with all processors if it has no devices."""
    if device == "cpu" or not host.devices:
        return 1
    return min(len(host.devices), host.slots) if host.slots else len(host.devices)


def completed(topology: Topology, gpus: int) -> Compute:
    """``[compute]`` completed with what follows from the hosts: one worker on each device, or on each host without devices. All
    workers form one synchronous group; with an exchange among groups, each worker is a group of its own. ``gpus``: the number
    of GPUs of this machine, used if this machine is the only host."""
    compute, hosts = topology.compute, topology.hosts
    counts = [workers_of(host, compute.device) for host in hosts]
    if len(hosts) == 1 and hosts[0].local and not hosts[0].devices and compute.device in ("auto", "cuda") and gpus > 1:
        counts = [min(gpus, hosts[0].slots) if hosts[0].slots else gpus]
    workers = sum(counts)
    each_alone = topology.exchange.kind in _AMONG_GROUPS and not compute.auto_groups
    sizes = {"groups": workers, "group_size": 1} if each_alone else {"group_size": workers}
    update: dict[str, Any] = {name: size for name, size in sizes.items() if getattr(compute, name) != size}
    parts = None if each_alone else _parts(topology, counts)
    if parts is not None:
        update["parts"] = parts
    if not update:
        return compute
    found = compute.model_copy(update=update)
    found.model_fields_set.difference_update(update)  # so that it is decided again if the hosts change
    return found


def _parts(topology: Topology, counts: Sequence[int]) -> tuple[float, ...] | Literal["measured"] | None:
    """How unequal hosts divide the batch: in proportion to slots, or as measured if only some have devices; ``None``: equally."""
    compute, slots = topology.compute, [host.slots for host in topology.hosts]
    if "parts" in compute.model_fields_set or compute.auto_groups or topology.data.shuffle == "ring":
        return None
    if compute.grid is not None or topology.parallel.statistics == "whole" or compute.threads or compute.device == "modelled":
        return None
    with_devices = {bool(host.devices) and compute.device != "cpu" for host in topology.hosts}
    if with_devices == {True, False}:
        return "measured"
    if True in with_devices or set(counts) != {1} or len(set(slots)) == 1 or 0 in slots:
        return None
    return tuple(float(count) for count in slots)
