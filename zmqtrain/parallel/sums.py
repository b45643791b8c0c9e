"""Weight gradients are summed over those who contribute to them: each layer's as soon as it is complete, or all after backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from zmqtrain.collectives.unreached import Parts, fill_unreached
from zmqtrain.parallel.communicator import Fabric, Label, Pending
from zmqtrain.parallel.shard import Shard

#: Sums that are begun at the end of backward and not waited for yet: each has two copies of the gradients.
_TOGETHER_BYTES = 8 << 20


class GradientSums:
    """The sums of one model's gradients. Made once; `finish` after every backward, which all processes of the group must call.

    All processes must have the same parameters in the same order of their backward, as divided models have. Parameters that get no
    gradient contribute nothing, and receive what others have; where no process has one, they have none afterwards either, so that
    an optimizer passes over them (`zmqtrain.collectives.unreached`).
    """

    def __init__(self, model: nn.Module, fabric: Fabric, shards: Mapping[str, Shard], *, overlap: bool = True) -> None:
        """``overlap``: whether layers are begun during backward; otherwise all at its end."""
        self._fabric = fabric
        self._layers = _layers(model.named_parameters(), shards, fabric.size)
        if overlap:
            for each in self._layers:
                for parameter in each.parameters:
                    parameter.register_post_accumulate_grad_hook(partial(self._ready, each))  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Wait until all gradients are the sums. Those that were not begun yet are, in reverse order of the model's layers."""
        begun: deque[_Layer] = deque()
        for layer in reversed(self._layers):
            if layer.pending is None:
                self._begin(layer)
                begun.append(layer)
                while len(begun) > 1 and sum(each.nbytes for each in begun) > _TOGETHER_BYTES:
                    self._end(begun.popleft())
        for layer in self._layers:
            if layer.pending is not None:
                self._end(layer)

    def _ready(self, layer: _Layer, _parameter: nn.Parameter) -> None:
        layer.complete += 1
        if layer.complete == len(layer.parameters):
            self._begin(layer)

    def _end(self, layer: _Layer) -> None:
        assert layer.pending is not None
        (flat,) = layer.pending.wait()
        layer.pending, layer.complete = None, 0
        layer.give(flat)

    def _begin(self, layer: _Layer) -> None:
        layer.pending = layer.begun(self._fabric)


class _Layer:
    """Parameters whose gradients travel together."""

    def __init__(self, name: str, members: tuple[int, ...], share: float, parameters: list[nn.Parameter]) -> None:
        self.name, self.members, self.parameters = name, members, parameters
        self._share = share
        self.complete = 0
        self.pending: Pending | None = None
        first = parameters[0]
        self.nbytes = sum(parameter.nbytes for parameter in parameters)
        *starts, numel = accumulate((parameter.numel() for parameter in parameters), initial=0)
        # Tensors without content say nothing.
        self._parts = Parts(starts if first.device.type != "meta" else (), numel, first.dtype)

    def begun(self, fabric: Fabric) -> Pending:
        """The sum, which others take part in."""
        return fabric.among(self.members).all_reduce(self.take(), Label(self.name, "dw", "backward"))

    def take(self) -> Tensor:
        """The gradients, one after another in memory of their own, which say what this process's backward has not reached."""
        unreached = [number for number, parameter in enumerate(self.parameters) if parameter.grad is None]
        flat = torch.cat([_gradient_of(parameter).flatten() for parameter in self.parameters])
        if self._share != 1.0:
            flat *= self._share
        if self._parts.starts:
            self._parts.say_reached(flat, but=unreached)
        return flat

    def give(self, flat: Tensor) -> None:
        """The sums are the gradients now; what no process's backward has reached has none."""
        unreached = self._parts.unreached(flat)
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        for number, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            parameter.grad = None if number in unreached else part.view(parameter.shape)


def sum_gradients(model: nn.Module, fabric: Fabric, shards: Mapping[str, Shard]) -> None:
    """Sum the gradients of all parameters over those who contribute to them, in place: a step of plain synchronous training.

    All processes of the group must call it. A layer's parameters travel together. A parameter that two modules share is summed
    once. One without a gradient contributes nothing, and receives what others have, if any has one.
    """
    GradientSums(model, fabric, shards, overlap=False).finish()


def sum_at_once(named: Iterable[tuple[str, nn.Parameter]], fabric: Fabric, shards: Mapping[str, Shard]) -> None:
    """The same of what stands for parameters, a few numbers each: all that is summed over the same ranks travels together."""
    layers = _layers(named, {name: replace(shard, layer="") for name, shard in shards.items()}, fabric.size)
    for layer, pending in [(each, each.begun(fabric)) for each in layers]:
        layer.give(*pending.wait())


def contributors(shard: Shard, size: int) -> tuple[tuple[int, ...], float]:
    """The ranks, of ``size`` in a group, over whom the gradient of a parameter is summed in training, and by what each multiplies
    its own before.

    Where a column's workers compute the same gradient of a whole parameter, each contributes a part of it, and all sum it: were
    each row to sum its own, rows whose processors round differently would drift apart, and no one would see it."""
    if shard.dimension is not None:
        return shard.summed_over, 1.0
    return tuple(range(size)), len(shard.summed_over) / size


def _layers(named: Iterable[tuple[str, nn.Parameter]], shards: Mapping[str, Shard], size: int) -> list[_Layer]:
    """The layer, the ranks, and the parameters of each sum of gradients."""
    together: dict[tuple[str, tuple[int, ...], float, torch.dtype], list[nn.Parameter]] = {}
    for name, parameter in named:
        members, share = contributors(shards[name], size)
        if parameter.requires_grad and len(members) > 1:
            together.setdefault((shards[name].layer, members, share, parameter.dtype), []).append(parameter)
    return [_Layer(layer, members, share, parameters) for (layer, members, share, _), parameters in together.items()]


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, with all its zeros; where it has none, zeros that say so."""
    if parameter.grad is None:
        return fill_unreached(torch.empty_like(parameter))
    return parameter.grad.to_dense() if parameter.grad.layout is not torch.strided else parameter.grad
