"""The topology file as data. ``Topology.model_json_schema()`` documents every field; `load` reads files with readable faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from zmqtrain.processors import gpus
from zmqtrain.topology.compute import Compute
from zmqtrain.topology.elastic import elastic_by_default
from zmqtrain.topology.exchange import Bound, ExchangeSection
from zmqtrain.topology.hosts import Host, Hosts, gathered
from zmqtrain.topology.job import Job, Until
from zmqtrain.topology.network import LinkRule, Network, NetworkHost, Rack
from zmqtrain.topology.parallel import Parallel
from zmqtrain.topology.plan import PlanSection
from zmqtrain.topology.ranges import MOST_HOSTS
from zmqtrain.topology.rules import broken_rules
from zmqtrain.topology.section import Section, _tuple
from zmqtrain.topology.simulation import Fault, Simulation
from zmqtrain.topology.tune import Tune
from zmqtrain.topology.workers import BY_HOSTS, by_hosts, completed
from zmqtrain.topology.world import Data, EngineSection, Observe, Optimizer

__all__ = [
    "Bound", "Compute", "Data", "EngineSection", "ExchangeSection", "Fault", "Host", "Job", "LinkRule", "Network", "NetworkHost",
    "Observe", "Optimizer", "PlanSection", "Rack", "Simulation", "Topology", "Tune", "Until",
]  # fmt: skip

#: pydantic's error type under which `Topology` reports broken rules, all of them in ``ctx["rules"]``.
RULES_ERROR = "broken_rules"


class Topology(Section):
    """A job: what is trained, on which machines, in which shape. Immutable, and complete: every default is filled in.

    `zmqtrain.load_topology` makes one from a file, and `from_dict` from plain values. docs/topology.md says what each field means.
    """

    job: Job = Field(description="What is trained, and for how long.")
    hosts: Hosts = Field(
        default=(),
        validate_default=True,
        description="The machines. Default: this machine with all its processors; under Slurm, the nodes of the allocation.",
    )
    compute: Compute = Field(default_factory=Compute, description="Workers, groups and the step.")
    exchange: ExchangeSection = Field(default_factory=ExchangeSection, description="How groups agree on parameters.")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="Changes to the task's own optimizer.")
    data: Data = Field(default_factory=Data, description="The training data.")
    engine: EngineSection = Field(default_factory=EngineSection, description="How agents are started.")
    network: Network = Field(
        default_factory=Network,
        description="The network between hosts: `zmqtrain simulate` models it, and `zmqtrain launch --emulate` shapes traffic "
        "accordingly. A plain launch uses the network as it is.",
    )
    simulation: Simulation = Field(default_factory=Simulation, description="How `zmqtrain simulate` runs the job.")
    faults: Annotated[tuple[Fault, ...], BeforeValidator(_tuple)] = Field(
        default=(),
        description="Faults to inject into a simulated or an emulated run, and when. Each has a `kind`, and either `at` or `step`.",
    )
    observe: Observe = Field(default_factory=Observe, description="What is recorded and shown.")
    tune: Tune = Field(default_factory=Tune, description="What `zmqtrain tune` chooses from, and how much time it may spend.")
    parallel: Parallel = Field(default_factory=Parallel, description="How the model is divided over the rows of `[compute] grid`.")
    plan: PlanSection = Field(default_factory=PlanSection, description="What `zmqtrain plan` takes into account.")

    @model_validator(mode="after")
    def _complete(self) -> Topology:
        """Fill in what the file leaves out, put plain hosts where ranges are, and check the rules between fields."""
        entries = self.hosts or (self._hosts_by_default(),)
        many = sum(entry.count for entry in entries) > MOST_HOSTS
        object.__setattr__(self, "hosts", () if many else tuple(host for entry in entries for host in entry.expanded()))
        if by_hosts(self.compute) and not many:
            object.__setattr__(self, "compute", completed(self, gpus()))
        if "kind" not in self.exchange.model_fields_set:
            kind = "model_server" if self.compute.groups > 1 or self.exchange.merged_fc else "allreduce"
            object.__setattr__(self, "exchange", self.exchange.model_copy(update={"kind": kind}))
        broken = broken_rules(self, entries)
        if broken:
            raise PydanticCustomError(RULES_ERROR, "; ".join(rule.message for rule in broken).replace("{", "{{"), {"rules": broken})
        return self

    def _hosts_by_default(self) -> Host:
        if self.engine.kind not in ("slurm", "ray"):
            return Host(name="localhost")
        # These stand for the nodes until the nodes are known.
        asked = self.engine.slurm if self.engine.kind == "slurm" else self.engine.ray
        each = max(1, asked.gpus) if by_hosts(self.compute) else -(-self.compute.workers // asked.nodes)
        name = f"node[1-{asked.nodes}]"
        address = name if self.engine.kind == "slurm" else "127.0.0.1"
        devices = tuple(f"cuda:{number}" for number in range(asked.gpus))
        return Host(name=name, address=address, slots=asked.cpus or each * (self.compute.threads or 1), devices=devices)

    @property
    def hosts_open(self) -> bool:
        """Whether the hosts become known only when the run begins; until then `hosts` stand for them."""
        return self.engine.gathers and "hosts" not in self.model_fields_set

    @property
    def hosts_decide(self) -> bool:
        """Whether the number of workers follows from the hosts (see `with_hosts`)."""
        return by_hosts(self.compute)

    def with_hosts(self, hosts: Sequence[Host]) -> Topology:
        """The job on these hosts; if the file leaves the number of workers open, it follows from the hosts.

        Raises pydantic's ``ValidationError`` if a rule is broken on these hosts."""
        return Topology.from_dict(
            {**self.to_open_dict(), "hosts": [host.model_dump(mode="json", exclude_none=True) for host in hosts]}
        )

    @property
    def servers(self) -> int:
        """The number of model servers of the job."""
        return self.exchange.shards if self.exchange.kind == "model_server" else 0

    @property
    def fc_servers(self) -> int:
        """The number of FC servers, which compute the fully connected layers for the workers."""
        return self.exchange.fc_servers if self.exchange.merged_fc else 0

    @property
    def fc_copied(self) -> bool:
        """Whether a second FC server has a copy of the merged layers."""
        return self.replicated and self.exchange.merged_fc

    @property
    def trains(self) -> bool:
        """Whether torch computes the steps; otherwise only their modelled time passes."""
        if self.job.task is None:
            return False
        return self.compute.device != "modelled" or self.simulation.payload == "real"

    @property
    def elastic(self) -> bool:
        """Whether the run carries on without workers that are lost."""
        return elastic_by_default(self) if self.job.elastic is None else self.job.elastic

    @property
    def forms_grids(self) -> bool:
        """Whether those that are left of an elastic run form another grid, since each has a part of the only model."""
        return self.elastic and self.compute.rows > 1 and self.exchange.kind == "allreduce"

    @property
    def whole_groups(self) -> bool:
        """Whether, in an elastic run, no worker of a group can train without the others, since they divide the group's model."""
        return self.elastic and self.compute.rows > 1 and not self.forms_grids

    @property
    def asks_elastic(self) -> bool:
        """Whether the file asks for that, so that a run which cannot do it is refused."""
        return bool(self.job.elastic or (self.job.restarts and self.elastic) or self.replicated)

    @property
    def spares(self) -> int:
        """How many workers may come beyond those with which the run begins."""
        return max(0, (self.job.max_workers or 0) - self.compute.workers) if self.elastic else 0

    @property
    def spare_servers(self) -> int:
        """How many model servers may come beyond those with which the run begins."""
        return max(0, (self.exchange.max_servers or 0) - self.servers) if self.moves_shards else 0

    @property
    def replicated(self) -> bool:
        """Whether the run carries on without a model server that is lost, since another one has its shard, too."""
        return self.exchange.kind == "model_server" and self.exchange.replicas > 0

    @property
    def moves_shards(self) -> bool:
        """Whether what a model server has may move to another one while the run trains. Servers and workers must know from the
        beginning, so it holds only for runs that are sure to carry on without lost workers."""
        several = self.exchange.kind == "model_server" and self.exchange.shards > 1
        return self.replicated or (several and self.elastic and self.asks_elastic and self.compute.group_size == 1)

    @property
    def divided(self) -> bool:
        """Whether the workers of a group divide the model, or the images, among them."""
        return self.compute.rows > 1 or (self.parallel.statistics == "whole" and self.compute.group_size > 1)

    @property
    def undecided(self) -> bool:
        """Whether the file leaves open how a step is divided or compressed (`zmqtrain.plan.decided`)."""
        return self.parallel.plan is not None or self.compute.grid == "auto" or self.exchange.compression == "auto"

    def encrypted(self, *, emulated: bool = False) -> bool:
        """Whether connections between the run's processes are encrypted. ``emulated``: all hosts run on this machine."""
        wanted = self.job.transport_encryption
        return wanted == "required" or (wanted == "auto" and not emulated and not all(host.local for host in self.hosts))

    def to_dict(self) -> dict[str, Any]:
        """The topology as plain values (strings, numbers, lists, dictionaries), without fields that are ``None``. `from_dict`
        restores it.
        """
        return self.model_dump(mode="json", exclude_none=True, by_alias=True)

    def to_open_dict(self) -> dict[str, Any]:
        """Like `to_dict`, but without the values that follow from the hosts, and without hosts if the file names none."""
        values = self.to_dict()
        if self.hosts_decide:
            given = self.compute.model_fields_set
            values["compute"] = {key: value for key, value in values["compute"].items() if key in given or key not in BY_HOSTS}
        if "hosts" not in self.model_fields_set:
            del values["hosts"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Topology:
        """The topology from plain values with the structure of a file, as `to_dict` returns them or as a program makes them.

        Raises `pydantic.ValidationError`, a `ValueError`, with all faults."""
        return cls.model_validate(values)

    def to_toml(self) -> str:
        """The complete topology as a file that loads to an equal one. Hosts that differ only by a number are written as a range."""
        from zmqtrain.topology.toml_writer import write_toml

        values = {**self.to_dict(), "hosts": [host.model_dump(mode="json") for host in gathered(self.hosts)]}
        return write_toml({name: value for name, value in values.items() if value != []})
