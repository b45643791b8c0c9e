"""An FC server's layers as a module: the model's whole fully connected phase, or this process's part of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.events import Recorder
from zmqtrain.merged_fc.phases import Phase
from zmqtrain.merged_fc.queue import Turn
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.placed.model import ParallelModel, parallelize
from zmqtrain.train.divided import DividedShare, PartConverter, Share
from zmqtrain.train.task import Measure

#: More than the micro-batches of any step, so that each micro-batch has a number of its own.
_MICRO_BATCHES = 1 << 17


class FcLayers:
    """The layers, computed in the compute thread; if they are divided, by all FC servers together."""

    def __init__(self, module: Phase | ParallelModel, share: Share, *, groups: int, writes_inputs: bool) -> None:
        """Use `whole` or `divided` to make one."""
        self.module: nn.Module = module
        self.parts = PartConverter.of(module)
        """Converts tensors to and from the form that checkpoints have."""
        self._share, self._groups, self._writes_inputs = share, groups, writes_inputs
        self._divided = module if isinstance(module, ParallelModel) else None

    @classmethod
    def whole(cls, phase: Phase, groups: int) -> FcLayers:
        """All layers of a phase."""
        return cls(phase, Share(), groups=groups, writes_inputs=phase.writes_inputs)

    @classmethod
    def divided(
        cls, phase: Phase, optimizer: Optimizer, groups: int, *, fabric: Fabric, loss: Measure, seed: int, recorder: Recorder
    ) -> FcLayers:
        """This process's part: each linear layer is divided by its outputs over all processes of ``fabric`` (Gholami et al. 2018,
        1.5D with one column). ``optimizer`` gets the parts in place of the phase's parameters.

        Layers that cannot be divided are computed by every process. Raises `UsageError` if the phase cannot be divided at all.
        """
        whole = {id(parameter): name for name, parameter in phase.named_parameters()}
        writes_inputs = phase.writes_inputs
        module = parallelize(phase, f"{fabric.size}x1", fabric=fabric, seed=seed, recorder=recorder, sizes=phase.sizes)
        for layer, reason in module.left_whole.items():
            recorder.event("left whole", layer=layer, reason=reason)
        _replace(optimizer, whole, module)
        return cls(module, DividedShare(module, 0, loss), groups=groups, writes_inputs=writes_inputs)

    def __call__(self, inputs: Sequence[Tensor], turn: Turn | None = None) -> Any:
        """The model's output for the phase's inputs. ``turn``: the turn in training; ``None`` in evaluation."""
        if self._divided is not None:
            self._divided.batch.size = len(inputs[0])
            if turn is not None:  # makes masks of dropout independent of the order of turns
                step = turn.step * _MICRO_BATCHES + turn.micro_batch
                self._divided.batch.step = step * self._groups + turn.group
        return self.module(*(each.clone() for each in inputs) if self._writes_inputs else inputs)

    def loss(self, measure: Measure, output: Any, target: Any) -> Any:
        """The loss, computed with ``measure``, of the model's output and target."""
        return self._share.loss(measure, output, target)


def _replace(optimizer: Optimizer, names: dict[int, str], module: ParallelModel) -> None:
    """Put the parts into the optimizer, with any state that it already keeps for the parameters (some keep it from the start)."""
    parts, cut = dict(module.named_parameters()), PartConverter.of(module).cut
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            name = names[id(parameter)]
            kept = optimizer.state.pop(parameter, {})
            group["params"][place] = parts[name]
            if kept:
                tensors = {f"{key}/{name}": value for key, value in kept.items() if isinstance(value, Tensor)}
                found = cut(tensors)
                optimizer.state[parts[name]] = {key: found.get(f"{key}/{name}", value) for key, value in kept.items()}
