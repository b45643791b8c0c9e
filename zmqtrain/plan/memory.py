"""The bytes that one process needs for a layer, by choice and grid."""

from __future__ import annotations

from dataclasses import dataclass, fields

from zmqtrain.plan.layers import Stage
from zmqtrain.plan.placed import Placed


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process keeps during a step. If parts are uneven, the largest is larger by at most one sample or unit."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    """Momentum and other optimizer state."""
    activations: float = 0.0
    """What the forward keeps for the backward: the inputs, and the outputs of the layer and of those that follow it."""

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def total(self) -> float:
        """The sum of all."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory(stage: Stage, placed: Placed, batch: int, *, word_bytes: int, optimizer_words: int) -> Memory:
    """A layer's memory. ``optimizer_words``: numbers that the optimizer keeps per weight, 1 for momentum and 2 for Adam.

    Whole and model-parallel layers keep all of their column's inputs (the gathered outputs of the layer before), model-parallel
    ones 1/Pr of their outputs.
    """
    grid = placed.grid
    samples = batch / grid.columns
    outputs = sum(layer.numel_out * layer.calls for layer in stage.layers)
    match placed.choice:
        case "model" if stage.head.by_inputs:
            weights, kept = stage.weights / grid.rows, samples * (stage.numel_in / grid.rows + outputs)
        case "model":
            weights, kept = stage.weights / grid.rows, samples * (stage.numel_in + outputs / grid.rows)
        case "domain":
            weights, kept = float(stage.weights), samples * (stage.numel_in + outputs) / grid.rows
        case _:
            weights, kept = float(stage.weights), samples * (stage.numel_in + outputs)
    size = weights * word_bytes
    return Memory(size, size, size * optimizer_words, kept * word_bytes)
