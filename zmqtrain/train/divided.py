"""A worker's part of a model that its group divides over a grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zmqtrain.collectives.group import bounds
from zmqtrain.data.batch import Batch
from zmqtrain.errors import ConnectivityError
from zmqtrain.events import Recorder
from zmqtrain.exchange.base import Bucket
from zmqtrain.membership.context import RoleContext
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.deferred import Tape
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.cross_entropy import CrossEntropy
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.network import NetworkFabric
from zmqtrain.parallel.placed.model import ParallelModel, parallelize
from zmqtrain.parallel.placed.tensor import Placed
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.parallel.shard import Shard, gather_state, gathered
from zmqtrain.parallel.sums import contributors
from zmqtrain.parallel.turns import turn
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.base import Device
from zmqtrain.train.hooks import OwnHook
from zmqtrain.train.shares import in_step
from zmqtrain.train.task import Measure
from zmqtrain.train.weighting import taken_apart


def make_fabric(context: RoleContext, device: Device, name: str = "grid") -> NetworkFabric | None:
    """The worker's connections to the others of its group; ``None`` if the model is not divided. Called on the loop's thread.

    ``name``: another for each fabric of a worker."""
    if not context.topology.divided:
        return None
    return NetworkFabric(
        context.endpoint,
        context.placement.group_members(context.role.group),
        f"{name}/{context.role.group}{context.generation}",
        condition=device.condition(),
        clock=device.clock,
        timeout_s=context.timeouts.barrier_s,
        recorder=context.recorder,
    )


def parallel_model(
    model: nn.Module, topology: Topology, fabric: Fabric, recorder: Recorder | None = None, tape: Tape | None = None
) -> ParallelModel:
    """Divide the model as the topology says, and nothing else. Raises `UsageError` if that is not possible.

    ``tape``: of a model whose large tensors have no content yet."""
    compute, settings = topology.compute, topology.parallel
    layers = tuple(LayerPlan(each.layer, each.choice, Grid.parse(each.grid), each.strips) for each in settings.layers)
    return parallelize(
        model,
        compute.grid or f"1x{compute.group_size}",
        Plan(layers) if layers else None,
        fabric=fabric,
        seed=topology.job.seed,
        statistics=settings.statistics or "whole",
        whole=settings.whole,
        strict=settings.strict,
        recorder=recorder,
        tape=tape,
    )


def divide(
    model: nn.Module, topology: Topology, fabric: NetworkFabric, recorder: Recorder, tape: Tape | None = None
) -> ParallelModel:
    """Divide the model as the topology says, for training. Called in the compute thread. Raises `UsageError`.

    ``tape``: of a model whose large tensors have no content yet; `CannotDeferError` is raised if they cannot get it."""
    divided = parallel_model(model, topology, fabric, recorder, tape)
    for layer, reason in divided.left_whole.items():
        recorder.event("left whole", layer=layer, reason=reason)
    shards = divided.shards_by_name()
    for name, parameter in divided.named_parameters():
        _, share = contributors(shards[name], fabric.size)
        if share != 1.0 and parameter.requires_grad:
            parameter.register_hook(OwnHook(_times(share)))  # type: ignore[no-untyped-call]
    return divided


def elements_of(model: ParallelModel, buckets: Sequence[Bucket]) -> list[list[tuple[str, Tensor]]]:
    """Of each bucket, in the order in which they lie there: the names of parameters, and for each element of this worker's part the
    number of that element in the whole parameter."""
    shards, rank = model.shards_by_name(), model.fabric.rank

    def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
        shard = shards.get(name)
        if shard is None or tuple(shard.shape) == shape:
            return torch.arange(math.prod(shape))
        whole = torch.arange(math.prod(shard.shape)).view(shard.shape)
        return shard.cut(whole, shard.members.index(rank)).reshape(-1)

    return [[(name, numbers(name, shape)) for name, shape in zip(each.names, each.shapes, strict=True)] for each in buckets]


class Share:
    """What a worker computes of its group's batch. Without a grid it computes everything that it is given."""

    @property
    def counts(self) -> bool:
        """Whether this worker's samples are counted, and not those of another worker with the same samples."""
        return True

    @property
    def all_have_samples(self) -> bool:
        """Whether all workers of the group have samples of the last output."""
        return True

    def begin(self, step: int, micro_batch: int, micro_batches: int, group_samples: int | None = None) -> None:
        """Announce the next forward. ``group_samples``: of the group's batch, if not the usual number."""

    def waited_s(self) -> float:
        """Seconds for which the compute thread has waited for others of the group since the last call."""
        return 0.0

    def backward(self) -> AbstractContextManager[None]:
        """A context for the backward."""
        return nullcontext()

    def of_output(self, batch: Batch) -> Batch:
        """The part of ``batch``, the model's input, whose output this worker has."""
        return batch

    def loss(self, measure: Measure, output: Any, target: Any) -> Any:
        """Compute ``measure``, the task's loss, of this worker's output and target."""
        return measure(output, target)


class DividedShare(Share):
    """The share of a worker of a grid: the workers of a column are given the same samples."""

    def __init__(self, model: ParallelModel, group_batch: int, loss: Measure | None) -> None:
        self._model, self._group_batch = model, group_batch
        # A cross-entropy of logits that stay divided sends three numbers per sample and row, and gathering sends all logits.
        self._entropy = _cross_entropy(loss)
        self._divided: CrossEntropy | None = None
        self._waited_s = 0.0
        if loss is not None:
            model.keeps_divided = self._entropy is not None

    @property
    def counts(self) -> bool:
        return self._model.counts_output

    @property
    def all_have_samples(self) -> bool:
        place, size = self._model.output_placement, self._model.batch.size
        return all(len(range(*place.samples_of(size, rank))) for rank in range(self._model.fabric.size))

    def begin(self, step: int, micro_batch: int, micro_batches: int, group_samples: int | None = None) -> None:
        columns = [stop - start for start, stop in bounds(group_samples or self._group_batch, self._model.grid.columns)]
        parts = [bounds(samples, micro_batches)[micro_batch] for samples in columns]
        self._model.batch.size = sum(stop - start for start, stop in parts)
        self._model.batch.step = step * micro_batches + micro_batch

    def waited_s(self) -> float:
        fabric, before = self._model.fabric, self._waited_s
        self._waited_s = fabric.waited_s if isinstance(fabric, NetworkFabric) else 0.0
        return self._waited_s - before

    def backward(self) -> AbstractContextManager[None]:
        """What a backward computes again (`torch.utils.checkpoint`) draws the random numbers of the first time.

        Torch computes a device's backward in a thread of its own, which waits there for other workers and could not hand over this
        thread's turn. Workers of a device that take turns, as threads of one process, are in tests only."""
        return turn() if all(each.device.type == "cpu" for each in self._model.parameters()) else nullcontext()

    def of_output(self, batch: Batch) -> Batch:
        return batch.part(self._model.output_range())

    def loss(self, measure: Measure, output: Any, target: Any) -> Any:
        if not isinstance(output, Placed):
            return measure(output, target)
        place = output.placement
        if output.divided != 1 or not place.origin or not _are_classes(target) or self._entropy is None:
            return measure(self._model.whole(output), target)
        if self._divided is None:
            self._divided = CrossEntropy(self._entropy, Site(place.origin, place.grid, self._model.fabric), place.divisions)
        return self._divided(self._model.own(output), target)


def share_of_model(model: nn.Module, group_batch: int, loss: Measure | None = None) -> Share:
    """The share of a worker with this model in its group's batches of ``group_batch`` samples. ``loss``: the task's loss
    function."""
    return DividedShare(model, group_batch, loss) if isinstance(model, ParallelModel) else Share()


def numbers_of_loss(loss: Measure, target: Any) -> int:
    """How many numbers of each sample the rows of a grid tell each other where this loss takes logits as they are divided; 0 if it
    needs them whole. ``loss``: as `loss_on_grid` returns it."""
    entropy = _cross_entropy(loss)
    return 0 if entropy is None or not _are_classes(target) else 4 if entropy.label_smoothing else 3


def loss_on_grid(loss: Measure, topology: Topology) -> Measure:
    """The loss as the workers of a grid compute it: one that returns (sum, weight), if it is torch's with class weights or an
    ``ignore_index``, and samples are divided. If they are not, logits may stay divided in it."""
    compute = topology.compute
    together = compute.columns == compute.accumulate == 1 and not (topology.parallel.layers or topology.parallel.plan)
    return loss if together and (compute.groups == 1 or not in_step(topology)) else taken_apart(loss)


def _cross_entropy(loss: Measure | None) -> nn.CrossEntropyLoss | None:
    """The loss as a module, if it is torch's mean cross-entropy; otherwise ``None``."""
    if loss is nn.functional.cross_entropy:
        return nn.CrossEntropyLoss()
    return loss if isinstance(loss, nn.CrossEntropyLoss) and loss.reduction == "mean" else None


def _are_classes(target: Any) -> bool:
    return isinstance(target, Tensor) and not target.is_floating_point()


class PartConverter:
    """Converts tensors of parameters and buffers between this worker's parts and the whole tensors that checkpoints hold."""

    def __init__(self, shards: Mapping[str, Shard], fabric: Fabric | None) -> None:
        self._shards, self._fabric = shards, fabric

    @classmethod
    def of(cls, model: nn.Module) -> PartConverter:
        """The converter for the parameters and buffers of a model, divided or not."""
        return cls(model.shards_by_name(), model.fabric) if isinstance(model, ParallelModel) else cls({}, None)

    @classmethod
    def among(cls, model: nn.Module, fabric: Fabric) -> PartConverter:
        """As `of`, but the workers of ``fabric`` stand in for this worker's column: one of each row, in their order, from whatever
        columns. A model that is not divided is whole on each."""
        if not isinstance(model, ParallelModel):
            return cls({}, None)
        members = tuple(range(fabric.size))
        shards = model.shards_by_name()
        assert all(shard.dimension is None or len(shard.members) == fabric.size for shard in shards.values())
        return cls({name: replace(shard, members=members) for name, shard in shards.items()}, fabric)

    def require_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `ConnectivityError` if ``tensors``, by the names of parameters and buffers, lack one of this worker's parts: a
        forward has been broken off that had taken it away."""
        held = self._held(tensors)
        gone = [name for name in tensors if name in self._shards and name not in held]
        if gone:
            raise ConnectivityError(f"the forward was broken off where {gone[0]} was not in its place, so others cannot have it")

    @property
    def divided(self) -> bool:
        return self._fabric is not None

    @property
    def shards(self) -> Mapping[str, Shard]:
        """How each parameter and buffer is divided, by its name; empty if none is."""
        return self._shards

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather the whole tensors of which this worker has parts. Keys are names of parameters and buffers, after any
        ``kind/key/``.

        All workers of the group call it, in their compute threads. Tensors whose shape is not that of the parameter's part, like a
        step counter, are returned unchanged."""
        if self._fabric is None:
            return dict(tensors)
        return gather_state(tensors, self._held(tensors), self._fabric)

    def gathered(self, tensors: Mapping[str, Tensor], to: int) -> Iterator[tuple[str, Tensor]]:
        """As `whole`, one after another, for the group's worker ``to`` alone: the others have nothing, and go to the end, too."""
        return iter(tensors.items()) if self._fabric is None else gathered(tensors, self._held(tensors), self._fabric, to=to)

    def _held(self, tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
        """The shards of those tensors of which this worker has a part."""
        row = self._row()
        return {
            key: shard
            for key, tensor in tensors.items()
            if (shard := self._shards.get(_name(key))) is not None and tuple(tensor.shape) == shard.local_shape(row(shard))
        }

    def cut(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This worker's parts of whole tensors, with the same keys."""
        if self._fabric is None:
            return dict(tensors)
        row, found = self._row(), {}
        for key, tensor in tensors.items():
            shard = self._shards.get(_name(key))
            found[key] = shard.cut(tensor, row(shard)) if shard is not None and tuple(tensor.shape) == shard.shape else tensor
        return found

    def _row(self) -> Callable[[Shard], int]:
        assert self._fabric is not None
        rank = self._fabric.rank
        return lambda shard: shard.members.index(rank)


def _name(key: str) -> str:
    """The parameter or buffer to which a checkpoint's tensor belongs: names have no slashes."""
    return key.rpartition("/")[2]


def _times(share: float) -> Callable[[Tensor], Tensor]:
    return partial(_multiplied, share)


def _multiplied(share: float, gradient: Tensor) -> Tensor:
    return gradient * share
