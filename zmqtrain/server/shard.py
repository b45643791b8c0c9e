"""The part of the model that one server holds: pieces of parameters, their optimizers and versions.

Synchronous arithmetic without I/O. Each piece has an optimizer of its own, so that an update can begin when the piece's gradient is
there; for optimizers that work element by element that equals one optimizer over the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zmqtrain.errors import CheckpointError, ProtocolError
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.optimizer import build_optimizer, set_hyperparameters
from zmqtrain.exchange.pieces import Piece
from zmqtrain.net.endpoint import Sent
from zmqtrain.wire.dtypes import torch_dtype
from zmqtrain.wire.payload import Value


class Loan:
    """A piece's memory on its way to a worker. While it is out, an update goes to a copy: no read is ever torn."""

    __slots__ = ("_back", "sent", "values")

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.sent: Sent | None = None
        self._back = False

    def give_back(self) -> None:
        """The memory was not sent after all."""
        self._back = True

    @property
    def out(self) -> bool:
        return not self._back and (self.sent is None or not self.sent.released)


class HeldPiece:
    """A piece's values, optimizer and version (the number of updates that it has seen)."""

    __slots__ = ("_base", "_loans", "_now", "_optimizer", "dtype", "piece", "values", "version")

    def __init__(self, piece: Piece, dtype: str, parameter_group: int, optimizer: OptimizerSpec) -> None:
        self.piece = piece
        self.dtype = dtype
        self.values = torch.nn.Parameter(torch.zeros(piece.numel, dtype=torch_dtype(dtype)))
        self.version = 0
        self._base = dict(optimizer.groups[parameter_group])
        self._now: Mapping[str, Value] | None = None
        self._optimizer = build_optimizer(OptimizerSpec(optimizer.name, (self._base,)), [[self.values]])
        self._loans: list[Loan] = []

    def lend(self) -> Loan:
        """The values as they are now, to be sent. Set ``sent`` of the loan, or `give_back`."""
        loan = Loan(self.values.detach())
        self._loans.append(loan)
        return loan

    def update(self, gradient: Tensor, hyperparameters: Mapping[str, Value] | None = None) -> None:
        """One step of the optimizer. ``gradient`` is only read; ``hyperparameters``: those that differ from the configured ones."""
        self._own_memory()
        if hyperparameters != self._now:
            set_hyperparameters(self._optimizer, [{**self._base, **(hyperparameters or {})}])
            self._now = hyperparameters
        self.values.grad = gradient
        self._optimizer.step()
        self.values.grad = None
        self.version += 1

    def check_hyperparameters(self, given: Mapping[str, Value] | None) -> None:
        """Raise `ProtocolError` for what `update` could not use."""
        for key, value in (given or {}).items():
            known = self._base.get(key)
            if key not in self._base or (isinstance(known, int | float) and not isinstance(value, int | float)):
                raise ProtocolError(f"{key} = {value!r:.100} is no hyperparameter of this optimizer; those are {self._base}")

    def tensors(self) -> dict[str, Tensor]:
        """Values and optimizer state by name, copied: what a checkpoint keeps."""
        result = {"values": self.values.detach().clone()}
        for key, value in self._optimizer.state.get(self.values, {}).items():
            if isinstance(value, Tensor):
                result[f"optimizer.{key}"] = value.detach().clone()
            elif value is not None:
                result[f"optimizer.{key}"] = torch.tensor(value)
        return result

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """What `tensors` gave. Raises `CheckpointError` where it belongs to another cut of the model."""
        values = tensors.get("values")
        if values is None or values.shape != self.values.shape or values.dtype != self.values.dtype:
            found = "nothing" if values is None else f"{values.dtype}{list(values.shape)}"
            raise CheckpointError(
                f"the checkpoint has {found} for piece {self.piece.index}, now {self.values.dtype}{list(self.values.shape)}: "
                "resume with the model, group_size, shards, split_size and bucket_size of the run that wrote it"
            )
        with torch.no_grad():
            self.values.copy_(values)
        state: dict[str, Any] = {
            name.removeprefix("optimizer."): value.clone() for name, value in tensors.items() if name.startswith("optimizer.")
        }
        if state:
            self._optimizer.state[self.values] = state
        self.version = version

    def _own_memory(self) -> None:
        """Leave the memory to loans that are still out, if any."""
        self._loans = [loan for loan in self._loans if loan.out and loan.values.data_ptr() == self.values.data_ptr()]
        if self._loans:
            self.values.data = self.values.detach().clone()
            self._loans = []


class GroupSum:
    """The sum of the groups' gradients of one piece, always in the order of groups, so that it does not depend on who was first.

    A gradient whose predecessors have arrived is added at once and dropped; the others wait.
    """

    __slots__ = ("_expected", "_own", "_total", "_waiting", "count")

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = list(expected)
        self._waiting: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self._own = False
        self.count = 0

    def add(self, group: int, gradient: Tensor) -> None:
        """Take a gradient, which is only read and must stay as it is until the sum is done."""
        self._waiting[group] = gradient
        while self._expected and self._expected[0] in self._waiting:
            self._fold(self._expected.pop(0))

    def mean(self) -> Tensor:
        """The mean over all gradients that came (groups that left and gave none do not count)."""
        for group in sorted(self._waiting):
            self._fold(group)
        assert self._total is not None
        if self.count == 1:
            return self._total
        return self._total.div_(self.count)

    def _fold(self, group: int) -> None:
        gradient = self._waiting.pop(group)
        self.count += 1
        if self._total is None:
            self._total = gradient
        elif self._own:
            self._total.add_(gradient)
        else:  # the first one is the transport's memory and not ours to write to
            self._total, self._own = self._total + gradient, True
