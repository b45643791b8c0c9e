"""A worker's part of a model that its group divides over a grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from zmqtrain.collectives.group import bounds
from zmqtrain.data.batch import Batch
from zmqtrain.events import Recorder
from zmqtrain.membership.context import RoleContext
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.cross_entropy import CrossEntropy
from zmqtrain.parallel.network import NetworkFabric
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.parallel.rewrite.model import ParallelModel, parallelize
from zmqtrain.parallel.rewrite.spread import Spread
from zmqtrain.parallel.shard import Shard, gather_state
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.base import Device
from zmqtrain.train.rows import share_of
from zmqtrain.train.task import Measure


def make_fabric(context: RoleContext, device: Device) -> NetworkFabric | None:
    """The worker's connections to the others of its group; ``None`` where the model is not divided. On the loop's thread."""
    if not context.topology.divided:
        return None
    return NetworkFabric(
        context.endpoint,
        context.placement.group_members(context.role.group),
        f"grid/{context.role.group}",
        condition=device.condition(),
        clock=device.clock,
        timeout_s=context.timeouts.barrier_s,
        recorder=context.recorder,
    )


def divide(model: nn.Module, topology: Topology, fabric: NetworkFabric, recorder: Recorder) -> ParallelModel:
    """The model as the topology divides it. In the compute thread. Raises `UsageError`."""
    compute, settings = topology.compute, topology.parallel
    layers = tuple(LayerPlan(each.layer, each.choice, Grid.parse(each.grid)) for each in settings.layers)
    divided = parallelize(
        model,
        compute.grid or f"1x{compute.group_size}",
        Plan(layers) if layers else None,
        fabric=fabric,
        seed=topology.job.seed,
        statistics=settings.statistics or "whole",
        whole=settings.whole,
        strict=settings.strict,
        recorder=recorder,
    )
    for layer, reason in divided.left_whole.items():
        recorder.event("left whole", layer=layer, reason=reason)
    shards = divided.shards_by_name()
    for name, parameter in divided.named_parameters():
        share = share_of(shards[name], fabric.size)
        if share != 1.0 and parameter.requires_grad:
            parameter.register_hook(_times(share))  # type: ignore[no-untyped-call]
    return divided


class Share:
    """What a worker has of its group's batch: everything of what it was given."""

    @property
    def counts(self) -> bool:
        """Whether this worker's samples count, and not another's who has the same."""
        return True

    def begin(self, step: int, micro_batch: int, micro_batches: int) -> None:
        """A forward comes next."""

    def waited_s(self) -> float:
        """Seconds that the compute thread has waited for others of the group since the last call."""
        return 0.0

    def of_output(self, batch: Batch) -> Batch:
        """The samples of ``batch``, which the model was given, that its output is of."""
        return batch

    def loss(self, measure: Measure, output: Any, target: Any) -> Any:
        """Of the model's output."""
        return measure(output, target)


class DividedShare(Share):
    """A column's workers are given the same samples."""

    def __init__(self, model: ParallelModel, group_batch: int, loss: Measure | None) -> None:
        self._model, self._group_batch = model, group_batch
        # The cross-entropy of logits that stay divided costs three numbers a sample and row, and gathering them all of them.
        self._entropy = _cross_entropy(loss)
        self._divided: CrossEntropy | None = None
        self._waited_s = 0.0
        if loss is not None:
            model.keeps_divided = self._entropy is not None

    @property
    def counts(self) -> bool:
        model = self._model
        return model.output_samples == "all" or model.grid.place(model.fabric.rank)[0] == 0

    def begin(self, step: int, micro_batch: int, micro_batches: int) -> None:
        columns = [stop - start for start, stop in bounds(self._group_batch, self._model.grid.columns)]
        parts = [bounds(samples, micro_batches)[micro_batch] for samples in columns]
        self._model.batch.size = sum(stop - start for start, stop in parts)
        self._model.batch.step = step * micro_batches + micro_batch

    def waited_s(self) -> float:
        fabric, before = self._model.fabric, self._waited_s
        self._waited_s = fabric.waited_s if isinstance(fabric, NetworkFabric) else 0.0
        return self._waited_s - before

    def of_output(self, batch: Batch) -> Batch:
        return batch.part(self._model.output_range())

    def loss(self, measure: Measure, output: Any, target: Any) -> Any:
        if not isinstance(output, Spread):
            return measure(output, target)
        if output.divided != 1 or output.origin is None or not _are_classes(target) or self._entropy is None:
            return measure(self._model.whole(output), target)
        if self._divided is None:
            self._divided = CrossEntropy(self._entropy, output.origin, output.placement.divisions)
        return self._divided(output.local, target)


def share_of_model(model: nn.Module, group_batch: int, loss: Measure | None = None) -> Share:
    """What a worker with this model has of its group's batches, of ``group_batch`` samples; ``loss``: the task's."""
    return DividedShare(model, group_batch, loss) if isinstance(model, ParallelModel) else Share()


def _cross_entropy(loss: Measure | None) -> nn.CrossEntropyLoss | None:
    """The loss as a module, if it is torch's mean cross-entropy."""
    if loss is nn.functional.cross_entropy:
        return nn.CrossEntropyLoss()
    return loss if isinstance(loss, nn.CrossEntropyLoss) and loss.reduction == "mean" else None


def _are_classes(target: Any) -> bool:
    return isinstance(target, Tensor) and not target.is_floating_point()


class Parts:
    """Tensors of a model's parameters and buffers, as checkpoints have them: whole, whatever the grid."""

    def __init__(self, shards: Mapping[str, Shard], fabric: Fabric | None) -> None:
        self._shards, self._fabric = shards, fabric

    @classmethod
    def of(cls, model: nn.Module) -> Parts:
        """Those of a model, divided or not."""
        return cls(model.shards_by_name(), model.fabric) if isinstance(model, ParallelModel) else cls({}, None)

    @property
    def divided(self) -> bool:
        return self._fabric is not None

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole of what this worker has a part of. Keys are names of parameters and buffers, after any ``kind/key/``.

        All workers of the group call it, in their compute threads. Parts of another shape than the parameter's, like a step
        counter, stay as they are."""
        if self._fabric is None:
            return dict(tensors)
        row = self._row()
        shards = {
            key: shard
            for key, tensor in tensors.items()
            if (shard := self._shards.get(_name(key))) is not None and tuple(tensor.shape) == shard.local_shape(row(shard))
        }
        return gather_state(tensors, shards, self._fabric)

    def cut(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This worker's parts of whole tensors."""
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
    """The parameter or buffer that a checkpoint's tensor belongs to: names have no slashes."""
    return key.rpartition("/")[2]


def _times(share: float) -> Callable[[Tensor], Tensor]:
    return partial(_multiplied, share)


def _multiplied(share: float, gradient: Tensor) -> Tensor:
    return gradient * share
