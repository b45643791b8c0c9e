"""The pods of a run: replicated jobs, each with one pod per host. Pure."""

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
    """One replicated job: its pods are hosts with the same settings. The host of pod i is ``NAME-i``."""

    name: str
    hosts: tuple[Host, ...]

    @property
    def gpus(self) -> int:
        """The number of GPUs of each pod."""
        return sum(device.startswith("cuda") for device in self.hosts[0].devices)


def pods_of(topology: Topology) -> tuple[Pods, ...]:
    """The replicated jobs of a run, without the launcher's. If the file lists no hosts, each role gets a pod of its own.

    Raises `UsageError` if the hosts' names do not have the form of pod names.
    """
    hosts = topology.hosts if "hosts" in topology.model_fields_set else tuple(_one_for_each_role(topology))
    by_job: dict[str, list[Host]] = {}
    for host in hosts:
        match = _POD.fullmatch(host.name)
        if match is None or match[1] == LAUNCHER_JOB or match[2] != str(len(by_job.get(match[1], ()))):
            raise UsageError(
                f'[[hosts]] {host.name!r} is not the name of a pod: call the hosts of one kind "workers-[0-3]" '
                f'(numbered from 0 without gaps or leading zeros, in lower case), and call none of them "{LAUNCHER_JOB}"'
            )
        by_job.setdefault(match[1], []).append(host)
    for job, alike in by_job.items():
        if len({(host.slots, host.devices, tuple(sorted(host.environment.items()))) for host in alike}) > 1:
            raise UsageError(
                f"the hosts {job}-0 to {job}-{len(alike) - 1} differ in slots, devices or environment, but all pods of a job are "
                f"the same: use a different name for each kind"
            )
    return tuple(Pods(job, tuple(alike)) for job, alike in by_job.items())


def _one_for_each_role(topology: Topology) -> Sequence[Host]:
    """One pod for each role: workers first, and as few slots as possible on the others, so that each role is placed on its own
    pod."""
    threads = topology.compute.threads or 1
    workers = [Host(name=f"workers-{number}", slots=threads) for number in range(topology.compute.workers)]
    count = topology.servers + topology.fc_servers + topology.fc_copied
    servers = [Host(name=f"servers-{number}", slots=1) for number in range(count)]
    return [*workers, *servers]
