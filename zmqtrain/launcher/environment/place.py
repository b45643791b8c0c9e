"""What the environment says about this node: where the launcher is, and which of the run's nodes this one is. Pure.

Schedulers, and the operators on top of them, each have variables of their own::

    first variable found     scheduler
    PET_*                    torchrun's own settings, which Kubeflow gives its pods
    SKYPILOT_NODE_RANK       SkyPilot
    JOBSET_NAME              a Kubernetes JobSet that sets it for its pods, like launch/jobset.yaml
    SLURM_NODEID             a step of Slurm (srun)
    MASTER_ADDR              any launcher that follows torch.distributed

``MASTER_ADDR`` and ``MASTER_PORT`` take precedence over the variables of Slurm, SkyPilot and JobSets, since they were set on
purpose; and each variable of our own (``ZMQTRAIN_*``) takes precedence over all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zmqtrain.errors import UsageError
from zmqtrain.membership.environment import BIND, COORDINATOR_ADDRESS, HOST
from zmqtrain.topology.node_list import expand_node_list

#: Which host of the file this node is.
NAME = "ZMQTRAIN_NAME"
#: Its number among the nodes, from 0.
NODE_RANK = "ZMQTRAIN_NODE_RANK"
#: How many nodes there are.
NODES = "ZMQTRAIN_NODES"
#: The default port on which a launcher listens for nodes.
DEFAULT_PORT = 29400
#: The replicated job of a JobSet whose only pod is the launcher's.
LAUNCHER_JOB = "launcher"


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node's place in a run, as far as its environment gives it."""

    system: str = ""
    """The scheduler that set the variables; empty: only variables of our own, if any."""
    launcher: str | None = None
    """Name or address of the launcher's machine."""
    port: int | None = None
    """The launcher's port."""
    names: tuple[str, ...] = ()
    """Possible names of the host in the topology file, the likeliest first."""
    rank: int | None = None
    """The node's number."""
    nodes: int | None = None
    """The number of nodes."""
    address: str | None = None
    """The node's own address for others."""
    bind: str | None = None
    """The address at which its processes listen, if it is a different one."""


def read_place(environ: Mapping[str, str], *, together: bool = False) -> NodePlace:
    """The place that the variables describe. ``together``: all nodes run the same command, and the launcher is on the first.

    Raises `UsageError`, which names the variable, if a value is wrong.
    """
    said = _Variables(environ)
    place = next((read(said, together) for marks, read in _SYSTEMS if any(said.text(mark) for mark in marks)), NodePlace())
    if place.system in ("SkyPilot", "JobSet", "Slurm"):
        place = replace(
            place, launcher=said.text("MASTER_ADDR") or place.launcher, port=said.number("MASTER_PORT", 1) or place.port
        )
    host, port = split_endpoint(said.text(COORDINATOR_ADDRESS) or "", COORDINATOR_ADDRESS)
    name = said.text(NAME)
    rank, nodes = said.number(NODE_RANK), said.number(NODES, 1)
    place = replace(
        place,
        launcher=host or place.launcher,
        port=port or place.port,
        names=place.names if name is None else (name,),
        rank=place.rank if rank is None else rank,
        nodes=place.nodes if nodes is None else nodes,
        address=said.text(HOST) or said.text("POD_IP") or place.address,
        bind=said.text(BIND) or place.bind,
    )
    if place.rank is not None and place.nodes is not None and place.rank >= place.nodes:
        raise UsageError(
            f"this is node {place.rank} of {place.nodes} nodes, which are numbered from 0: correct {NODE_RANK} or {NODES}"
        )
    return place


def split_endpoint(text: str, variable: str) -> tuple[str | None, int | None]:
    """``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT`` as host and port. Raises `UsageError`, which names the variable."""
    if not text:
        return None, None
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        colon, port = rest[:1], rest[1:]
    elif text.count(":") > 1:  # an IPv6 address alone
        host, colon, port = text, "", ""
    else:
        host, colon, port = text.partition(":")
    if not host or "/" in host or (colon and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise UsageError(f"{variable} is {text!r}; it must be HOST:PORT, the address on which the launcher listens ([job] port)")
    return host, int(port) if colon else None


class _Variables:
    """The environment, with errors that name the variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str | None:
        """The first of these variables that is set."""
        return next((value for name in names if (value := self._environ.get(name, "").strip())), None)

    def number(self, name: str, least: int = 0) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not value.isdecimal() or int(value) < least:
            raise UsageError(f"{name} is {value!r}; it must be a number, {least} or more")
        return int(value)

    def nodes(self, *names: str) -> tuple[str, ...]:
        """The first of these lists of nodes that is set."""
        for name in names:
            value = self.text(name)
            if value is not None:
                try:
                    return expand_node_list(value)
                except ValueError as error:
                    raise UsageError(f"{name} {error}") from error
        return ()


def _kubeflow(said: _Variables, _together: bool) -> NodePlace:
    """Kubeflow sets torchrun's variables. An elastic job has a range of nodes, and its pods have no numbers."""
    host = port = None
    if said.text("PET_RDZV_BACKEND") in (
        None,
        "c10d",
        "static",
    ):  # otherwise the address is that of a separate server, such as etcd
        host, port = split_endpoint(said.text("PET_RDZV_ENDPOINT") or "", "PET_RDZV_ENDPOINT")
    nodes = said.text("PET_NNODES")
    least, _, most = (nodes or "").partition(":")
    count = None if nodes is None or (most and most != least) else least
    if count is not None and not (count.isdecimal() and int(count)):
        raise UsageError(f"PET_NNODES is {nodes!r}; it must be a number of nodes, or a range like 2:4")
    return NodePlace(
        "Kubeflow",
        launcher=host or said.text("PET_MASTER_ADDR", "MASTER_ADDR"),
        port=port or said.number("PET_MASTER_PORT", 1) or said.number("MASTER_PORT", 1),
        rank=said.number("PET_NODE_RANK"),
        nodes=None if count is None else int(count),
        names=_own_name(said),
    )


def _skypilot(said: _Variables, _together: bool) -> NodePlace:
    addresses = (said.text("SKYPILOT_NODE_IPS") or "").split()
    rank = said.number("SKYPILOT_NODE_RANK")
    if rank is not None and addresses and rank >= len(addresses):
        raise UsageError(f"SKYPILOT_NODE_RANK is {rank}, but SKYPILOT_NODE_IPS has {len(addresses)} addresses")
    return NodePlace(
        "SkyPilot",
        launcher=addresses[0] if addresses else None,
        rank=rank,
        nodes=len(addresses) or said.number("SKYPILOT_NUM_NODES", 1),
        address=None if rank is None or not addresses else addresses[rank],
    )


def _jobset(said: _Variables, together: bool) -> NodePlace:
    """The pods of a JobSet have the names that its headless service gives them: JOBSET-REPLICATED_JOB-JOB-POD.SUBDOMAIN."""
    jobset, job = said.text("JOBSET_NAME"), said.text("REPLICATED_JOB_NAME")
    number, index = said.number("JOB_INDEX") or 0, said.number("JOB_COMPLETION_INDEX")
    subdomain = said.text("JOBSET_SUBDOMAIN") or jobset
    names: tuple[str, ...] = ()
    if job is not None and index is not None:
        # A replicated job usually consists of one job: then the pods' numbers are enough.
        names = (f"{job}-{number}-{index}", *((f"{job}-{index}",) if number == 0 else ()))
    first = job if together else LAUNCHER_JOB
    return NodePlace(
        "JobSet",
        launcher=said.text("JOBSET_COORDINATOR") or (None if first is None else f"{jobset}-{first}-0-0.{subdomain}"),
        names=names,
        rank=index if together and number == 0 else None,
    )


def _slurm(said: _Variables, _together: bool) -> NodePlace:
    local = said.number("SLURM_LOCALID")
    if local:
        raise UsageError(
            f"SLURM_LOCALID is {local}: only one agent per node is needed, which starts all processes there. Use srun "
            f"--ntasks-per-node=1 zmqtrain agent ..."
        )
    nodes = said.nodes("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = said.text("SLURMD_NODENAME")
    return NodePlace(
        "Slurm",
        launcher=nodes[0] if nodes else None,
        names=() if name is None else (name,),
        rank=said.number("SLURM_NODEID"),
        nodes=len(nodes) or said.number("SLURM_NNODES", 1),
    )


def _torch(said: _Variables, _together: bool) -> NodePlace:
    rank = said.number("NODE_RANK")
    nodes = said.number("NNODES", 1)
    return NodePlace(
        "torch.distributed",
        launcher=said.text("MASTER_ADDR"),
        port=said.number("MASTER_PORT", 1),
        rank=said.number("RANK") if rank is None else rank,
        nodes=said.number("WORLD_SIZE", 1) if nodes is None else nodes,
        names=_own_name(said),
    )


def _own_name(said: _Variables) -> tuple[str, ...]:
    """A pod's own name. Other machines may set it, too, and then it serves as well."""
    name = said.text("HOSTNAME")
    return () if name is None else (name,)


_SYSTEMS = (
    (("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"), _kubeflow),
    (("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"), _skypilot),
    (("JOBSET_NAME",), _jobset),
    (("SLURM_NODEID",), _slurm),
    (("MASTER_ADDR",), _torch),
)
