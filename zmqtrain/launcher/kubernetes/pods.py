"""Which pods a run has: replicated jobs, each with one pod a host. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.errors import UsageError
from zmqtrain.launcher.environment.place import LAUNCHER_JOB
from zmqtrain.topology.schema import Host, Topology

_POD = re.compile(r"([a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?)-(\d{1,5})")


@dataclass(frozen=True, slots=True)
class Pods:
    """One replicated job: its pods are hosts that are alike. The host of pod i is ``NAME-i``."""

    name: str
    hosts: tuple[Host, ...]

    @property
    def gpus(self) -> int:
        """Of each pod."""
        return sum(device.startswith("cuda") for device in self.hosts[0].devices)


def pods_of(topology: Topology) -> tuple[Pods, ...]:
    """The replicated jobs of a run, but the launcher's. Where the file lists no hosts, each role has a pod of its own.

    Raises `UsageError` where hosts are not called as pods are.
    """
    hosts = topology.hosts if "hosts" in topology.model_fields_set else tuple(_one_for_each_role(topology))
    by_job: dict[str, list[Host]] = {}
    for host in hosts:
        match = _POD.fullmatch(host.name)
        if match is None or match[1] == LAUNCHER_JOB or match[2] != str(len(by_job.get(match[1], ()))):
            raise UsageError(
                f'[[hosts]] {host.name!r} is no name of a pod: call the hosts of one kind "workers-[0-3]", counted from 0 '
                f'without gaps or leading zeros, in lower case, and none "{LAUNCHER_JOB}"'
            )
        by_job.setdefault(match[1], []).append(host)
    for job, alike in by_job.items():
        if len({(host.slots, host.devices, tuple(sorted(host.environment.items()))) for host in alike}) > 1:
            raise UsageError(
                f"the hosts {job}-0 to {job}-{len(alike) - 1} differ in slots, devices or environment, but pods of one job are "
                "alike: call them by two names"
            )
    return tuple(Pods(job, tuple(alike)) for job, alike in by_job.items())


def _one_for_each_role(topology: Topology) -> Sequence[Host]:
    """Workers first, and as few slots on others: so each kind finds its own pods when roles are placed."""
    threads = topology.compute.threads or 1
    workers = [Host(name=f"workers-{number}", slots=threads) for number in range(topology.compute.workers)]
    servers = [Host(name=f"servers-{number}", slots=1) for number in range(topology.servers + topology.fc_servers)]
    return [*workers, *servers]
