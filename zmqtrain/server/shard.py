"""The part of the model that one server holds: pieces of parameters, their optimizers and versions.

Synchronous arithmetic without I/O. Each piece has an optimizer of its own, so that an update can begin when the piece's gradient
has arrived; for optimizers that work element by element that equals one optimizer over the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zmqtrain.arena.arena import Arena
from zmqtrain.collectives.unreached import Parts
from zmqtrain.errors import CheckpointError, ProtocolError
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.clip import norm_of, squares_of
from zmqtrain.exchange.look_ahead import risen
from zmqtrain.exchange.optimizer import bare_step, build_optimizer, require_state, set_hyperparameters
from zmqtrain.exchange.pieces import Piece
from zmqtrain.server.look_ahead import LookAhead
from zmqtrain.server.shard_entry import Loan
from zmqtrain.wire.dtypes import torch_dtype
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload


class TensorEntry:
    """Implements `zmqtrain.server.shard_entry.ShardEntry` with values and an optimizer. Its gradients are flat tensors."""

    payload_type = TensorPayload

    __slots__ = (
        "_base",
        "_before",
        "_ceiling",
        "_keeps_before",
        "_loans",
        "_look_ahead",
        "_name",
        "_now",
        "_optimizer",
        "_parts",
        "_rise",
        "_split",
        "_step",
        "dtype",
        "piece",
        "values",
        "version",
    )

    def __init__(
        self,
        piece: Piece,
        dtype: str,
        parameter_group: int,
        optimizer: OptimizerSpec,
        arena: Arena | None = None,
        *,
        horizon: float = 0.0,
        rises: Sequence[float] = (),
        ceilings: Sequence[float] = (),
        starts: Sequence[int] = (),
    ) -> None:
        """The values are in ``arena``, if there is one: workers of this host then read them there. ``horizon``: the number of
        updates that they look ahead (`LookAhead`). ``rises``: the numbers of updates over which the learning rates of the parameter
        groups rise (`risen`). ``ceilings``: by how much those rates may be multiplied at most (none: any). ``starts``:
        those of the parameters in the piece, if gradients mark unreached parameters."""
        self.piece = piece
        self.dtype = dtype
        self.values = torch.nn.Parameter(_zeros(piece.numel, torch_dtype(dtype), arena))
        self.version = 0
        self._base = dict(optimizer.groups[parameter_group])
        self._now: Mapping[str, Value] | None = None
        self._name = optimizer.name
        self._optimizer = build_optimizer(OptimizerSpec(self._name, (self._base,)), [[self.values]])
        self._step = bare_step(self._optimizer)
        self._loans: list[Loan] = []
        self._keeps_before = False
        self._before: Tensor | None = None
        self._look_ahead = LookAhead(horizon)
        self._rise = rises[parameter_group] if rises else 0.0
        self._ceiling = ceilings[parameter_group] if ceilings else math.inf
        self._parts = Parts(starts, piece.numel, torch_dtype(dtype))
        self._split: list[torch.nn.Parameter] = []
        """The parameters; set when the optimizer skips one of them for the first time."""

    def memory(self) -> TensorPayload:
        return TensorPayload.of(self.values.detach())

    def gradient(self, payload: Payload) -> Tensor:
        assert isinstance(payload, TensorPayload)
        return payload.tensor.view(-1)

    def squares(self, gradient: Tensor) -> float:
        return squares_of(gradient)

    def norm(self, gradient: Tensor) -> float:
        return norm_of(gradient)

    def lend(self, meta: Value = None) -> Loan:
        loan = Loan(TensorPayload.of(self.values.detach(), meta))
        self._loans.append(loan)
        return loan

    def pass_over(self) -> None:
        self._before = None
        self.version += 1

    def keep_before(self) -> None:
        self._keeps_before = True

    def lend_before(self, meta: Value = None) -> Loan:
        assert self._keeps_before, "keep_before() comes before the update"
        if self._before is None:  # it has changed nothing
            return self.lend(meta)
        return Loan(TensorPayload.of(self._before, meta))  # nothing writes to it any more

    def update(
        self, gradient: Tensor, hyperparameters: Mapping[str, Value] | None = None, factor: float = 1.0, rate: float = 1.0
    ) -> None:
        if self._keeps_before:
            self._before = self.values.detach().clone()
        self._own_memory()
        unreached = self._parts.unreached(gradient)
        if factor != 1.0:
            gradient = gradient * factor
        if hyperparameters != self._now:
            set_hyperparameters(self._optimizer, [{**self._base, **(hyperparameters or {})}])
            self._now = hyperparameters
        self._give(gradient, unreached)
        group = self._optimizer.param_groups[0]
        lr = group["lr"]
        if (part := risen(self.version, self._rise) * min(rate, self._ceiling)) != 1:
            group["lr"] = lr * part
        self._look_ahead.update(self.values, self._step, group, self.version)
        group["lr"] = lr
        for parameter in (self.values, *self._split):
            parameter.grad = None
        self.version += 1

    def _give(self, gradient: Tensor, unreached: Sequence[int]) -> None:
        """Pass the gradient to the optimizer, without the parameters that no backward has reached."""
        if unreached and not self._split and len(self._parts.starts) > 1:
            self._divide()
        if not self._split:
            self.values.grad = None if unreached else gradient
            return
        for number, (parameter, part) in enumerate(zip(self._split, self._cut(gradient), strict=True)):
            parameter.grad = None if number in unreached else part

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [flat[start:stop] for start, stop in zip(self._parts.starts, self._parts.stops, strict=True)]

    def _divide(self) -> None:
        """Give each parameter in the piece an optimizer state of its own."""
        self._split = [torch.nn.Parameter(part) for part in self._cut(self.values.detach())]
        before = self._optimizer
        self._optimizer = build_optimizer(OptimizerSpec(self._name, ({**self._base, **(self._now or {})},)), [self._split])
        self._step = bare_step(self._optimizer)
        for key, value in before.state.get(self.values, {}).items():
            if isinstance(value, Tensor) and value.shape == self.values.shape:
                states = [part.clone() for part in self._cut(value)]
            else:
                states = [value.clone() if isinstance(value, Tensor) else value for _ in self._split]
            for parameter, state in zip(self._split, states, strict=True):
                self._optimizer.state[parameter][key] = state

    def check_hyperparameters(self, given: Mapping[str, Value] | None) -> None:
        require_known(given, self._base)

    def tensors(self) -> dict[str, Tensor]:
        """The values, how far they are ahead, and the optimizer state."""
        result = {"values": self.values.detach().clone()}
        if self._look_ahead.ahead is not None:
            result["ahead"] = self._look_ahead.ahead.clone()
        for prefix, parameter in self._owners().items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    result[f"{prefix}.{key}"] = value.detach().clone()
                elif value is not None:
                    result[f"{prefix}.{key}"] = torch.tensor(value)
        return result

    def _owners(self) -> dict[str, torch.nn.Parameter]:
        """The parameters for which the optimizer keeps state, by their names in a checkpoint."""
        if not self._split:
            return {"optimizer": self.values}
        return {f"part.{number}": parameter for number, parameter in enumerate(self._split)}

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        values = tensors.get("values")
        if values is None or values.shape != self.values.shape or values.dtype != self.values.dtype:
            found = "nothing" if values is None else f"{values.dtype}{list(values.shape)}"
            raise CheckpointError(
                f"the checkpoint has {found} for piece {self.piece.index}, but here it is "
                f"{self.values.dtype}{list(self.values.shape)}: resume with the model, group_size, shards, split_size and "
                "bucket_size of the run that wrote it"
            )
        ahead = tensors.get("ahead")
        if ahead is not None and (ahead.shape != values.shape or ahead.dtype != values.dtype):
            raise CheckpointError(
                f"the checkpoint has {ahead.dtype}{list(ahead.shape)} as the amount by which piece {self.piece.index} is ahead"
            )
        with torch.no_grad():
            self.values.copy_(values)
        self._look_ahead.ahead = None if ahead is None else ahead.clone()
        if any(name.startswith("part.") for name in tensors) and not self._split:
            self._divide()
        for prefix, parameter in self._owners().items():
            state: dict[str, Any] = {
                name.removeprefix(f"{prefix}."): value.clone() for name, value in tensors.items() if name.startswith(f"{prefix}.")
            }
            if state:
                require_state(self._optimizer, f"piece {self.piece.index}", parameter, state)
                self._optimizer.state[parameter] = state
        self.version = version

    def _own_memory(self) -> None:
        """Leave the old memory to pending loans, if there are any, and continue in a copy."""
        self._loans = [loan for loan in self._loans if loan.out]
        if self._loans:
            self.values.data = self.values.detach().clone()
            for parameter, part in zip(self._split, self._cut(self.values.detach()) if self._split else (), strict=True):
                parameter.data = part
            self._loans = []


def _zeros(numel: int, dtype: torch.dtype, arena: Arena | None) -> Tensor:
    if arena is None:
        return torch.zeros(numel, dtype=dtype)
    block = arena.allocate(numel * dtype.itemsize, "a piece of the model")
    return torch.frombuffer(block.memory, dtype=dtype).zero_()


def require_known(given: Mapping[str, Value] | None, base: Mapping[str, Value]) -> None:
    """Raise `ProtocolError` for hyperparameters that the optimizer configured with ``base`` does not have."""
    for key, value in (given or {}).items():
        known = base.get(key)
        if key not in base or (isinstance(known, int | float) and not isinstance(value, int | float)):
            raise ProtocolError(f"{key} = {value!r:.100} is not a hyperparameter of this optimizer, which has {base}")


class GroupSum:
    """Implements `zmqtrain.server.shard_entry.Sum`, always in the order of groups, so that the result does not depend on timing.

    A gradient is added and dropped as soon as all gradients before it have arrived; until then it waits.
    """

    __slots__ = ("_expected", "_own", "_total", "_waiting", "count")

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = list(expected)
        self._waiting: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self._own = False
        self.count = 0

    def add(self, group: int, gradient: Tensor) -> None:
        self._waiting[group] = gradient
        while self._expected and self._expected[0] in self._waiting:
            self._fold(self._expected.pop(0))

    def mean(self) -> Tensor:
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
        else:  # the first one is the transport's memory, which must not be written
            self._total, self._own = self._total + gradient, True
