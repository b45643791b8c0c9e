"""The Slurm job that this process runs in: its nodes, their addresses, and the processors that it has there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zmqtrain.errors import UsageError
from zmqtrain.topology.hosts import Host

JOB, NODES, CPUS, TASKS, CPUS_PER_TASK = (
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK",
)  # fmt: skip
#: Seconds that a command of Slurm may take.
PATIENCE_S = 30.0
_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_FIELD = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the job."""

    name: str
    address: str
    slots: int
    """Processors that the job has there."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A job's nodes, in Slurm's order."""

    job: str
    nodes: tuple[Node, ...]

    @classmethod
    def here(cls, environ: Mapping[str, str] | None = None) -> Allocation | None:
        """The job that this process runs in; ``None`` if it runs in none. Raises `UsageError` if Slurm does not answer."""
        variables = os.environ if environ is None else environ
        job, listed = variables.get(JOB), variables.get(NODES)
        if not job or not listed:
            return None
        names = ask("scontrol", "show", "hostnames", listed).split()
        addresses = addresses_in(ask("scontrol", "--oneliner", "show", "node", listed))
        slots = slots_of(variables, len(names))
        return cls(job, tuple(Node(name, addresses.get(name, name), count) for name, count in zip(names, slots, strict=True)))

    def assigned(self, hosts: Sequence[Host]) -> dict[str, Node]:
        """The node of each host, by host name: the node of the same name, if there is one for every host, or else the next node in
        order. Raises `UsageError` if there are too few nodes."""
        if len(hosts) > len(self.nodes):
            raise UsageError(
                f"the file has {len(hosts)} hosts, but Slurm job {self.job} has {len(self.nodes)} nodes: request {len(hosts)} "
                f"nodes, or list fewer hosts"
            )
        by_name = {node.name: node for node in self.nodes}
        if all(host.name in by_name for host in hosts):
            return {host.name: by_name[host.name] for host in hosts}
        return {host.name: node for host, node in zip(hosts, self.nodes, strict=False)}

    def hosts(self, given: Sequence[Host] | None) -> tuple[Host, ...]:
        """The hosts of a run: the nodes, or the ``given`` hosts with their nodes' addresses, and with slots if they have none.
        Raises like `assigned`."""
        if given is None:
            return tuple(Host(name=node.name, address=node.address, slots=node.slots) for node in self.nodes)
        nodes = self.assigned(given)
        return tuple(_on_node(host, nodes[host.name]) for host in given)


def _on_node(host: Host, node: Node) -> Host:
    told = host.model_fields_set
    named = host.name == node.name and "address" in told and not host.local
    update = {
        "address": host.address if named else node.address,
        "slots": host.slots if "slots" in told and host.slots else node.slots,
    }
    return host.model_copy(update=update)


def slots_of(variables: Mapping[str, str], nodes: int) -> list[int]:
    """Processors that the job may use on each node: those for its tasks there, or else all that it has."""
    cpus = counts(variables.get(CPUS, "1"), nodes)
    per_task = variables.get(CPUS_PER_TASK, "")
    if not per_task.isdecimal() or int(per_task) < 1 or TASKS not in variables:
        return cpus
    # Slurm allocates whole cores, of which a task may use one thread.
    tasks = counts(variables[TASKS], nodes)
    return [max(1, min(have, count * int(per_task))) for have, count in zip(cpus, tasks, strict=True)]


def counts(text: str, nodes: int) -> list[int]:
    """``4(x2),2`` as a number for each node. Raises `UsageError` for anything else."""
    found: list[int] = []
    for part in text.split(","):
        match = _COUNTS.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"Slurm returned {text!r}, but a number for each node was expected, like 4(x2),2")
        found += [int(match[1])] * int(match[2] or 1)
    if len(found) < nodes:
        found += found[-1:] * (nodes - len(found))
    return found[:nodes]


def addresses_in(text: str) -> dict[str, str]:
    """The addresses of nodes, from the output of ``scontrol --oneliner show node``."""
    found = {}
    for line in text.splitlines():
        fields = dict(_FIELD.findall(line))
        if "NodeName" in fields and "NodeAddr" in fields:
            found[fields["NodeName"]] = fields["NodeAddr"]
    return found


def ask(*words: str) -> str:
    """The output of a Slurm command. Raises `UsageError` if it fails."""
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"there is no command {words[0]} here: launch on a machine with Slurm's commands, or choose another [engine] kind"
        )
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"{' '.join(words[:3])} took longer than {PATIENCE_S:g} s: check that Slurm's controller is running"
        ) from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise UsageError(f"{' '.join(words[:3])}: {said[0]}")
    return done.stdout
