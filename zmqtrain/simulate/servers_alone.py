"""What one process makes of the model that model servers hold, with plain torch, where groups that divide it are lost and come.

It follows the ledger of what workers and servers state: which batch a group took at a step, with which versions of the pieces it
computed, and which gradients each update of a piece is of. Nothing of exchanges, servers, replicas and divided models has a part
in it: a gradient is that of the whole model on a group's whole batch, and each piece has an optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from zmqtrain.data.batch import batch_of
from zmqtrain.data.loader import Reader
from zmqtrain.net.endpoint import PeerId
from zmqtrain.parallel.turns import generator_state, generators_kept
from zmqtrain.simulate.one_process import difference
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.schema import Topology
from zmqtrain.train.batches import partition_of
from zmqtrain.train.random_state import seed_everything
from zmqtrain.train.task import Task, build_model, build_optimizer, load_task

#: Some elements of a whole parameter, by its name and their numbers.
Part: TypeAlias = tuple[str, Tensor]
#: A group, and which of its teams it is.
Turn: TypeAlias = tuple[int, int]


def comparable(topology: Topology) -> bool:
    """Whether a run's arithmetic is that of this replay, up to the order of sums."""
    compute, optimizer = topology.compute, topology.optimizer
    alike = topology.parallel.statistics != "local" and compute.accumulate == 1 and compute.precision == "float32"
    adapted = topology.exchange.policy != "sync" and (optimizer.momentum, optimizer.look_ahead) != ("task", "none")
    served = topology.whole_groups and topology.exchange.kind == "model_server"
    return served and topology.trains and alike and not adapted and topology.job.weights is None


@dataclass(slots=True)
class _Update:
    """One update of a piece: of the gradients of these groups and steps."""

    piece: int
    version: int
    step: int
    of: list[tuple[int, int]]


@dataclass(slots=True)
class _Piece:
    """A piece of the model: its elements, and what they were after each update."""

    parts: Sequence[Part]
    optimizer: torch.optim.Optimizer
    values: nn.Parameter
    versions: list[Tensor] = field(default_factory=list)

    def update(self, gradient: Tensor, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        self.values.grad = gradient
        self.optimizer.step()


class ServersAlone:
    """Hears what roles state, and computes what the model should be."""

    def __init__(self, topology: Topology, placement: Placement, task: Task | None, data_path: str | None) -> None:
        """``task``: in place of the one that the topology names."""
        self._topology, self._placement, self._given, self._data_path = topology, placement, task, data_path
        self._lives: dict[PeerId, int] = {}  # a worker's team now
        self._holds: dict[PeerId, list[list[Part]]] = {}  # of a worker's buckets, the elements of whole parameters
        self._cut: dict[int, tuple[PeerId, int, int, int]] = {}  # piece -> one who exchanges it, the bucket, from where to where
        self._begins: dict[Turn, dict[int, int]] = {}  # with which versions of the pieces
        self._reads: dict[tuple[Turn, int], dict[int, int]] = {}  # team, piece -> for each step the version that was read for it
        self._trained: dict[tuple[int, int], tuple[int, Turn]] = {}  # group, step -> which batch, and by which team
        self._updates: list[_Update] = []

    def hear(self, peer: PeerId, what: str, values: Mapping[str, object]) -> None:
        """A role states a fact."""
        facts = cast(Mapping[str, Any], values)
        if what == "holds":
            self._holds[peer] = facts["elements"]()
        elif what == "begins with":
            self._lives[peer] = facts["life"]
            self._begins.setdefault(self._turn(peer), {}).update(facts["versions"])
            self._cut.update({piece: (peer, *span) for piece, span in facts["pieces"].items()})
        elif what == "read":
            self._reads.setdefault((self._turn(peer), facts["piece"]), {})[facts["step"]] = facts["version"]
        elif what == "takes":
            turn = self._turn(peer)
            self._trained[turn[0], facts["step"]] = facts["slot"], turn
        elif what == "applied":
            of = [(group, step) for group, step, _ in facts["reads"] if group not in facts["skipped"]]
            self._updates.append(_Update(facts["piece"], facts["version"], facts["step"], of))

    def differs(self, steps: int, state: Mapping[str, Tensor]) -> str | None:
        """How the parameters of the run's model differ from what they should be; ``None`` if they do not, or if a step draws random
        numbers, which are others in a run. (Buffers are those of one of the groups.)"""
        with generators_kept():
            try:
                expected = self._replayed()
            except LookupError as unknown:
                return f"the run's model cannot be computed: nobody has stated {unknown}"
        return None if expected is None else difference({name: state[name] for name in expected}, expected)

    def _turn(self, peer: PeerId) -> Turn:
        return self._placement.role(peer).group, self._lives[peer]

    def _replayed(self) -> Mapping[str, Tensor] | None:
        topology = self._topology
        task = self._given
        if task is None:
            assert topology.job.task is not None
            task = load_task(topology.job.task, topology.job.args, self._data_path, folders=(*topology.job.python_path, Path.cwd()))
        seed_everything(topology.job.seed)
        model = build_model(task)
        optimizer, _ = build_optimizer(task, model, topology)
        rates = self._rates(task)
        pieces = dict(self._pieces(model, optimizer))
        gradients: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        last_use = {each: number for number, update in enumerate(self._updates) for each in update.of}
        drawn = generator_state()
        for number, update in enumerate(self._updates):
            piece = pieces[update.piece]
            for each in update.of:
                if each not in gradients:
                    gradients[each] = self._gradient(task, model, pieces, *each)
            if update.of:
                own = [torch.cat([gradients[each][name].view(-1)[numbers] for name, numbers in piece.parts]) for each in update.of]
                piece.update(sum(own[1:], own[0]) / len(own), rates[update.step])
            piece.versions.append(piece.values.detach().clone())
            for each in update.of:
                if last_use[each] == number:
                    gradients.pop(each, None)
        for piece in pieces.values():
            _put(model, piece, piece.versions[-1])
        alike = torch.equal(generator_state(), drawn)
        return {name: each.detach() for name, each in model.named_parameters()} if alike else None

    def _rates(self, task: Task) -> Sequence[float]:
        """The learning rate of each step."""
        steps = 1 + max((update.step for update in self._updates), default=0)
        optimizer, schedule = build_optimizer(task, build_model(task), self._topology)
        found = []
        for _ in range(steps):
            found.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            if schedule is not None:
                schedule.step()
        return found

    def _pieces(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, _Piece]]:
        named = dict(model.named_parameters())
        given = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "initial_lr")}
        for index, (peer, bucket, start, stop) in self._cut.items():
            parts, before = [], 0
            for name, numbers in self._holds[peer][bucket]:
                here = numbers[max(0, start - before) : max(0, stop - before)]
                before += len(numbers)
                if len(here):
                    parts.append((name, here))
            values = nn.Parameter(torch.cat([named[name].detach().view(-1)[numbers] for name, numbers in parts]))
            # Elements of several parameters: the optimizers that servers run treat each element alone.
            own = type(optimizer)([values], **given)
            yield index, _Piece(parts, own, values, [values.detach().clone()])

    def _gradient(self, task: Task, model: nn.Module, pieces: Mapping[int, _Piece], group: int, step: int) -> Mapping[str, Tensor]:
        """Of the whole model, as the group had it at the step, on its whole batch."""
        topology = self._topology
        slot, turn = self._trained[group, step]
        first = self._begins[turn]
        for index, piece in pieces.items():
            reads = self._reads.get((turn, index), {})
            # It may have had nothing to train in the steps before this one.
            last = max((each for each in reads if each <= step), default=None)
            _put(model, piece, piece.versions[first[index] if last is None else reads[last]])
        source = task.training()
        reader = Reader(source.dataset, source.collate, source.transform)
        partition, batch = partition_of(source, topology.compute.groups, topology), topology.compute.batch_size
        at, place = divmod(slot, topology.compute.groups)
        indices = partition.run(at, place * batch, (place + 1) * batch)
        content = reader.prepared(indices, partial(reader.collated, indices), None)
        given = batch_of(content, len(indices), task.forward)
        model.zero_grad()
        task.loss(given.output(model), given.target).backward()  # type: ignore[no-untyped-call]
        if topology.optimizer.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), topology.optimizer.clip_norm)
        named = model.named_parameters()
        return {name: torch.zeros_like(each) if each.grad is None else each.grad.clone() for name, each in named}


def _put(model: nn.Module, piece: _Piece, values: Tensor) -> None:
    """Write the values of a piece into the model."""
    named, start = dict(model.named_parameters()), 0
    for name, numbers in piece.parts:
        named[name].detach().view(-1)[numbers] = values[start : start + len(numbers)]
        start += len(numbers)
