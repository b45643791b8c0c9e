"""An FC server's layers as a module: all of the model's fully connected phase, or this process's part of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.events import Recorder
from zmqtrain.merged_fc.phases import Phase
from zmqtrain.merged_fc.queue import Turn
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.rewrite.model import ParallelModel, parallelize
from zmqtrain.train.divided import DividedShare, Parts, Share
from zmqtrain.train.task import Measure

#: More micro-batches than a step can have, so that each has a number of its own.
_MICRO_BATCHES = 1 << 17


class FcLayers:
    """Computed in the compute thread; where they are divided, by all FC servers together."""

    def __init__(self, module: Phase | ParallelModel, share: Share, *, groups: int, writes_inputs: bool) -> None:
        """Made by `whole` and `divided`."""
        self.module: nn.Module = module
        self.parts = Parts.of(module)
        """How checkpoints have them."""
        self._share, self._groups, self._writes_inputs = share, groups, writes_inputs
        self._divided = module if isinstance(module, ParallelModel) else None

    @classmethod
    def whole(cls, phase: Phase, groups: int) -> FcLayers:
        """All of a phase."""
        return cls(phase, Share(), groups=groups, writes_inputs=phase.writes_inputs)

    @classmethod
    def divided(
        cls, phase: Phase, optimizer: Optimizer, groups: int, *, fabric: Fabric, loss: Measure, seed: int, recorder: Recorder
    ) -> FcLayers:
        """This process's part: each linear layer divided by its outputs over all processes of ``fabric`` (Gholami et al. 2018, 1.5D
        with one column). ``optimizer`` gets the parts in place of the phase's parameters.

        Raises `UsageError` where the phase cannot be divided. Layers that cannot be are computed by every process.
        """
        whole = {id(parameter): name for name, parameter in phase.named_parameters()}
        writes_inputs = phase.writes_inputs
        module = parallelize(
            phase, f"{fabric.size}x1", fabric=fabric, seed=seed, recorder=recorder, graph=phase.graph, sizes=phase.sizes
        )
        for layer, reason in module.left_whole.items():
            recorder.event("left whole", layer=layer, reason=reason)
        _replace(optimizer, whole, module)
        return cls(module, DividedShare(module, 0, loss), groups=groups, writes_inputs=writes_inputs)

    def __call__(self, inputs: Sequence[Tensor], turn: Turn | None = None) -> Any:
        """The model's output. ``turn``: whose it is, in training."""
        if self._divided is not None:
            self._divided.batch.size = len(inputs[0])
            if turn is not None:  # masks of dropout do not depend on the order of turns
                step = turn.step * _MICRO_BATCHES + turn.micro_batch
                self._divided.batch.step = step * self._groups + turn.group
        return self.module(*(each.clone() for each in inputs) if self._writes_inputs else inputs)

    def loss(self, measure: Measure, output: Any, target: Any) -> Any:
        """Of the output."""
        return self._share.loss(measure, output, target)


def _replace(optimizer: Optimizer, names: dict[int, str], module: ParallelModel) -> None:
    """Give the optimizer the parts, with what it keeps of the parameters already, as some do from their beginning."""
    parts, cut = dict(module.named_parameters()), Parts.of(module).cut
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            name = names[id(parameter)]
            kept = optimizer.state.pop(parameter, {})
            group["params"][place] = parts[name]
            if kept:
                tensors = {f"{key}/{name}": value for key, value in kept.items() if isinstance(value, Tensor)}
                found = cut(tensors)
                optimizer.state[parts[name]] = {key: found.get(f"{key}/{name}", value) for key, value in kept.items()}
