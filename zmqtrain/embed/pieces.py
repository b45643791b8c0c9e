"""What losses are computed of: the outputs of the model, or of layers that a loop calls itself, and those within the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from zmqtrain.train.hooks import OwnHook
from zmqtrain.train.loss_trial import MOST_OUTPUTS, rows_of

#: The most outputs of modules that are kept.
MOST_INNER = 1024


@dataclass(frozen=True, slots=True)
class Taken:
    """Outputs with a row for each sample."""

    outputs: list[Tensor]
    """The model's, or those of its layers if the model was not called."""
    inner: list[Node]
    """The operations that gave those of all modules."""


class Pieces:
    """The newest outputs of a model and its modules. A loop may call modules without the model: ``model.head(model.body(inputs))``.

    Nothing is kept of modules that are compiled, or whose hooks of the user's would see that their outputs are differentiated."""

    def __init__(self, model: nn.Module, samples: Callable[[], int | None]) -> None:
        """``samples``: returns the number of samples in the last batch, or ``None`` if nobody knows."""
        self._model, self._samples = model, samples
        self._within = 0  # so many forwards
        self._outputs: deque[Tensor] = deque(maxlen=MOST_OUTPUTS)  # of the model
        self._of_layers: deque[Tensor] = deque(maxlen=MOST_OUTPUTS)
        self._inner: deque[Node] = deque(maxlen=MOST_INNER)
        self._rows: int | None = None  # of the loop's own batch, since the last `take`
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        for module in self._model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._undo.append(module.register_forward_pre_hook(_Uncompiled(self._before)).remove)
                self._undo.append(module.register_forward_hook(_Uncompiled(self._after), with_kwargs=True).remove)

    def detach(self) -> None:
        """Idempotent."""
        while self._undo:
            self._undo.pop()()
        self.take()

    def take(self) -> Taken:
        """What has been kept since the last call."""
        taken = Taken(list(self._outputs or self._of_layers), list(self._inner))
        for kept in (self._outputs, self._of_layers, self._inner):
            kept.clear()
        self._within, self._rows = 0, None  # a forward may have raised an error
        return taken

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if not _in_backward():
            self._within += 1

    def _after(self, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        if _in_backward():  # of a checkpoint, which computes its forward again
            return
        self._within -= 1
        if not torch.is_grad_enabled() or module._backward_hooks or module._backward_pre_hooks:
            return
        samples = self._samples() or self._rows
        first = next((each for each in (*inputs, *named.values()) if isinstance(each, Tensor)), None)
        if samples is None and first is not None and first.ndim in (2, 4):
            samples = self._rows = len(first)  # features and images: the first dimension is the samples'
        rows = list(rows_of(output, samples)) if samples is not None else []
        self._inner.extend(each.grad_fn for each in rows if each.grad_fn is not None)
        if self._within == 0:
            (self._outputs if module is self._model else self._of_layers).extend(rows)


class _Uncompiled(OwnHook):
    """Does nothing in what is compiled, and breaks no graph."""

    def __call__(self, *arguments: Any) -> Any:
        return None if torch.compiler.is_dynamo_compiling() else self._call(*arguments)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
