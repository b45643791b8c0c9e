"""What one process makes of the models of groups that train apart and average or mix them, with plain torch: for comparison with a
run in which groups that divide their models are lost and come.

It follows the ledger of what workers state: which batch a group took, which groups an average was over, what a group was mixed
with, and with whose state one began. Nothing of exchanges, replicas and divided models has a part in it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.data.batch import Batch, batch_of
from zmqtrain.data.loader import Reader
from zmqtrain.data.partition import Partition
from zmqtrain.net.endpoint import PeerId
from zmqtrain.parallel.turns import generator_state, generators_kept
from zmqtrain.simulate.one_process import difference
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.schema import Topology
from zmqtrain.train.batches import partition_of
from zmqtrain.train.random_state import seed_everything
from zmqtrain.train.task import Task, build_model, build_optimizer, task_of_job

#: A batch in a model: its number, and who has trained it at which step.
Trained = tuple[int, int, int]


def comparable(topology: Topology) -> bool:
    """Whether a run's arithmetic is that of this replay, up to the order of sums."""
    compute = topology.compute
    alike = topology.parallel.statistics != "local" and compute.accumulate == 1 and compute.precision == "float32"
    exchange = topology.exchange
    follows = exchange.kind == "averaging" or (exchange.kind == "gossip" and exchange.gossip.exchange == "weights")
    return topology.whole_groups and follows and topology.trains and alike


class GroupsAlone:
    """Hears what workers state, and computes what their models should be."""

    def __init__(self, topology: Topology, placement: Placement, task: Task | None, data_path: str | None) -> None:
        """``task``: in place of the one that the topology names."""
        self._topology, self._placement, self._given, self._data_path = topology, placement, task, data_path
        self._averages: dict[tuple[int, tuple[str, ...]], tuple[PeerId, ...]] = {}  # step, parameters -> over whom
        self._joined: dict[int, dict[int, int]] = {}  # step -> group -> with whose state it begins
        self._models: dict[int, tuple[PeerId, ...]] = {}  # step -> over whom the run's model is
        self._samples: dict[tuple[int, int], dict[int, list[int]]] = {}  # step, group -> column -> what it trains
        self._holds: dict[PeerId, list[list[tuple[str, Tensor]]]] = {}  # of a worker's buckets, the elements of whole parameters
        self._mixed: dict[int, dict[tuple[PeerId, int], tuple[tuple[int, int], tuple[PeerId, ...]]]] = {}
        """Gossip: step -> worker and bucket -> which part of it is the mean with that of others, and these."""
        self._turns: dict[tuple[int, PeerId], int] = {}  # groups that take turns: step, worker -> its group's batch
        self._ended: dict[int, bool] = {}  # the groups that have trained to the end -> whether that came early
        self._due = 0  # the batches that are trained in all, if that is known
        self._wrong: list[str] = []

    def hear(self, peer: PeerId, what: str, values: Mapping[str, object]) -> None:
        """A worker states a fact."""
        facts = cast(Mapping[str, Any], values)
        group = self._group(peer) if peer.startswith("worker/") else -1
        if what == "counted":
            key, members = (facts["step"], tuple(facts["names"])), tuple(facts["members"])
            if self._averages.setdefault(key, members) != members:
                self._wrong.append(
                    f"the average of step {facts['step']} is over {members} for {peer}, others say {self._averages[key]}"
                )
        elif what == "joined":
            source = self._group(facts["source"])
            if self._joined.setdefault(facts["step"], {}).setdefault(group, source) != source:
                self._wrong.append(f"{peer} begins step {facts['step']} like group {source}, others of its group like another one")
            self._turns = {key: slot for key, slot in self._turns.items() if key[1] != peer or key[0] < facts["step"]}
            for step, mixed in self._mixed.items():  # the worker before it is lost, and was ahead
                if step >= facts["step"]:
                    self._mixed[step] = {key: what for key, what in mixed.items() if key[0] != peer}
        elif what == "holds":
            self._holds[peer] = facts["elements"]()
        elif what == "mixed":
            self._mixed.setdefault(facts["step"], {})[peer, facts["bucket"]] = tuple(facts["span"]), tuple(facts["sources"])
        elif what == "takes":
            self._turns[facts["step"], peer] = facts["slot"]
        elif what == "all trained":
            self._ended[group] = facts["early"]
        elif what == "run model":
            self._models[facts["step"]] = tuple(facts["members"])
        elif what == "samples":
            column = self._topology.compute.column_of(self._placement.role(peer).position)
            self._samples.setdefault((facts["step"], group), {})[column] = [int(each) for each in facts["ids"]]

    def differs(self, steps: int, state: Mapping[str, Tensor]) -> str | None:
        """How the run's model of a step differs from what it should be; ``None`` if it does not, or if a step draws random numbers,
        which are others in a run."""
        if self._wrong:
            return self._wrong[0]
        with generators_kept():
            groups = self._trained(steps)
        if groups is None or self._wrong:
            return next(iter(self._wrong), None)
        found = difference(state, self._run_model(groups, self._models[steps]))
        return self._wrong_batches(groups, self._models[steps]) if found is None else found

    def _wrong_batches(self, groups: Sequence[_Alone], members: Sequence[PeerId]) -> str | None:
        """Each batch counts once, if groups take turns; one that is lost when all have trained takes along what nobody else has."""
        there = dict.fromkeys(map(self._group, members))
        if not self._turns:
            return None
        taken_along = {slot for (_, peer), slot in self._turns.items() if self._group(peer) in self._ended.keys() - there.keys()}
        # Parameters may be averaged at different steps: what is in all of them counts.
        each = (frozenset[Trained]().union(*(groups[n].contains[name] for n in there)) for name in groups[0].contains)
        times = Counter(slot for slot, _, _ in frozenset.intersection(*each))
        if twice := sorted(slot for slot, count in times.items() if count > 1):
            return f"batch {twice[0]} counts {times[twice[0]]} times, one of {len(twice)}"
        if missing := sorted({*range(self._due)} - {*times} - taken_along):
            return f"{len(missing)} of {self._due} batches count nowhere, the first of which is {missing[0]}"
        return None

    def _batch_of(self, partition: Partition, step: int, group: int) -> Any:
        """The samples that a group trains at a step."""
        if self._topology.data.shuffle == "ring":  # a group that is not there trains nothing
            columns = self._samples.get((step, group), {})
            return np.array([each for _, ids in sorted(columns.items()) for each in ids], np.int64)
        at, of, batch = step, group, self._topology.compute.batch_size
        if self._turns:
            if (slot := self._slot(step, group)) is None:
                return np.zeros(0, np.int64)
            at, of = divmod(slot, self._topology.compute.groups)
        return partition.run(at, of * batch, (of + 1) * batch)

    def _slot(self, step: int, group: int) -> int | None:
        """The batch that a group takes at a step, if it takes one."""
        takes = {self._turns.get((step, peer)) for peer in self._placement.group_members(group)} - {None}
        if len(takes) > 1:
            self._wrong.append(f"at step {step} the workers of group {group} take different batches: {sorted(map(str, takes))}")
        return next(iter(takes), None)

    def _group(self, peer: PeerId) -> int:
        return self._placement.role(peer).group

    def _trained(self, steps: int) -> list[_Alone] | None:
        topology, job = self._topology, self._topology.job
        task = self._given
        if task is None:
            task = task_of_job(job, self._data_path, here=Path.cwd())
        source = task.training()
        reader = Reader(source.dataset, source.collate, source.transform)
        partition = partition_of(source, topology.compute.groups, topology)
        whole = job.steps is None and job.until is None and not any(self._ended.values())
        self._due = partition.end(job.epochs or 1) * topology.compute.groups if whole else 0
        groups = [_Alone.of(task, topology) for _ in range(topology.compute.groups)]
        drawn = generator_state()
        for step in range(steps + 1):
            begins = self._joined.get(step, {})
            for number, other in begins.items():
                assert other not in begins, "a group that was there before gives its state"
                groups[number].begin_like(groups[other])
            if step == steps:
                break
            for number, group in enumerate(groups):
                indices = self._batch_of(partition, step, number)
                if len(indices):
                    content = reader.prepared(indices, partial(reader.collated, indices), None)
                    group.train(task, batch_of(content, len(indices), task.forward), topology.optimizer.clip_norm)
                if (slot := self._slot(step, number)) is not None:
                    group.has(frozenset({(slot, number, step)}))
                group.next_rate()
            self._average(step, groups)
            self._mix(step, groups)
        return groups if torch.equal(generator_state(), drawn) else None

    def _average(self, step: int, groups: Sequence[_Alone]) -> None:
        averaging = self._topology.exchange.averaging
        for (at, names), members in self._averages.items():
            if at == step:
                there = [groups[number] for number in dict.fromkeys(map(self._group, members))]
                for name in names:
                    travelling = [group.travels(name, averaging.method) for group in there]
                    mean = sum(travelling[1:], travelling[0]) / len(there)
                    had = frozenset[Trained]().union(*(group.contains[name] for group in there))
                    for group, own in zip(there, travelling, strict=True):
                        scale = len(there) / len(groups) if averaging.method == "elastic" else 1.0
                        group.flights[step, name] = own, mean * scale, had
        for group in groups:
            for begun, name in [key for key in group.flights if key[0] + averaging.overlap_steps == step]:
                group.lands(name, *group.flights.pop((begun, name)), self._topology, len(groups))

    def _mix(self, step: int, groups: Sequence[_Alone]) -> None:
        before = [{name: each.clone() for name, each in group.parameters.items()} for group in groups]
        had = [frozenset[Trained]().union(*group.contains.values()) for group in groups]
        for number, group in enumerate(groups):
            for source in self._wholly_mixed(step, number):
                group.has(had[source])
        for (peer, bucket), (span, sources) in self._mixed.get(step, {}).items():
            own, start = self._group(peer), 0
            for name, numbers in self._holds[peer][bucket]:
                here = numbers[max(0, span[0] - start) : max(0, span[1] - start)]
                start += len(numbers)
                all_of_them = [before[group][name].view(-1)[here] for group in (own, *map(self._group, sources))]
                groups[own].parameters[name].view(-1)[here] = sum(all_of_them[1:], all_of_them[0]) / len(all_of_them)

    def _wholly_mixed(self, step: int, group: int) -> set[int]:
        """The groups of whose models all parts have come to this one at a step."""
        mixed, members = self._mixed.get(step, {}), self._placement.group_members(group)
        keys = [(peer, bucket) for peer in members for bucket in range(len(self._holds.get(peer, ())))]
        sources = [set(map(self._group, mixed[key][1])) if key in mixed else set[int]() for key in keys]
        return set.intersection(*sources) if sources else set()

    def _run_model(self, groups: Sequence[_Alone], members: Sequence[PeerId]) -> Mapping[str, Tensor]:
        there = [groups[number] for number in dict.fromkeys(map(self._group, members))]
        state = dict(there[0].model.state_dict())
        for name in there[0].parameters:
            if self._topology.exchange.kind == "averaging" and self._topology.exchange.averaging.method == "elastic":
                state[name] = there[0].center[name]
            else:
                state[name] = sum((group.parameters[name] for group in there[1:]), there[0].parameters[name].clone()) / len(there)
        return state


@dataclass
class _Alone:
    """A group's model, and what goes with it."""

    model: nn.Module
    optimizer: Optimizer
    schedule: Any
    center: dict[str, Tensor]
    """Or, of an outer optimizer, the last common model."""
    momentum: dict[str, Tensor]
    contains: dict[str, frozenset[Trained]]
    """Parameter -> what it has been trained on."""
    flights: dict[tuple[int, str], tuple[Tensor, Tensor, frozenset[Trained]]] = field(default_factory=dict)
    """Step and parameter -> what the group has sent to be averaged, the mean, and what that contains."""

    @classmethod
    def of(cls, task: Task, topology: Topology) -> _Alone:
        seed_everything(topology.job.seed)
        model = build_model(task)
        optimizer, schedule = build_optimizer(task, model, topology)
        first = {name: each.detach().clone() for name, each in model.named_parameters()}
        momentum = {name: torch.zeros_like(each) for name, each in first.items()}
        return cls(model, optimizer, schedule, first, momentum, dict.fromkeys(first, frozenset()))

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in self.model.named_parameters()}

    def begin_like(self, other: _Alone) -> None:
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(deepcopy(other.optimizer.state_dict()))
        self.center, self.momentum, self.flights = deepcopy((other.center, other.momentum, other.flights))
        self.contains = dict(other.contains)

    def has(self, more: frozenset[Trained]) -> None:
        """All parameters contain this, too."""
        self.contains = {name: each | more for name, each in self.contains.items()}

    def train(self, task: Task, batch: Batch, clip_norm: float) -> None:
        self.optimizer.zero_grad()
        task.loss(batch.output(self.model), batch.target).backward()  # type: ignore[no-untyped-call]
        if clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        self.optimizer.step()

    def next_rate(self) -> None:
        """The schedule of the learning rate goes by steps, whether the group trains in them or not."""
        if self.schedule is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                self.schedule.step()

    def travels(self, name: str, method: str) -> Tensor:
        own = self.parameters[name]
        return own.clone() if method == "average" else own - self.center[name] if method == "elastic" else self.center[name] - own

    def lands(self, name: str, own: Tensor, mean: Tensor, had: frozenset[Trained], topology: Topology, groups: int) -> None:
        averaging, parameter = topology.exchange.averaging, self.parameters[name]
        self.contains[name] |= had
        if averaging.method == "elastic":
            alpha = 0.9 / groups if averaging.alpha is None else averaging.alpha
            parameter -= alpha * own
            self.center[name] += alpha * groups * mean
            return
        if averaging.method == "outer":
            self.momentum[name] = averaging.outer_momentum * self.momentum[name] + mean
            self.center[name] -= averaging.outer_lr * (mean + averaging.outer_momentum * self.momentum[name])
            mean = self.center[name]
        mix = averaging.mix if averaging.overlap_steps else 0.0
        parameter.copy_(mix * parameter + (1 - mix) * mean)
