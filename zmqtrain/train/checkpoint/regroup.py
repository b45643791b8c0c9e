"""What checkpoints keep of each group, for a run with another number of groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.checkpoint_part import Part
from zmqtrain.wire.payload import Value

#: What averaging keeps, the same in all groups.
_ALIKE = ("center", "last", "momentum")


def mean_state(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One optimizer's state in place of several, by the names of its tensors: their means, as the model is the mean of models. Of
    single numbers (how many steps were taken) the largest; of what only some have, the mean over these."""
    if len(states) == 1:
        return dict(states[0])
    together: dict[str, list[Tensor]] = {}
    for state in states:
        for name, tensor in state.items():
            together.setdefault(name, []).append(tensor)
    return {name: _mean(name, tensors) for name, tensors in together.items()}


def _mean(name: str, tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if any(tensor.shape != first.shape or tensor.dtype != first.dtype for tensor in tensors):
        raise CheckpointError(f"groups have {name} in different shapes or types, which have no mean: resume with as many groups")
    if not first.dim():
        return torch.stack(list(tensors)).max()
    if not first.is_floating_point():
        return first
    total = first.clone()
    for tensor in tensors[1:]:
        total += tensor
    return total.div_(len(tensors))


def shared_state(kind: str, own: Part) -> dict[str, Value]:
    """The exchange's own state in a worker's part, which is the same in all groups, so that any number of them can go on with it.
    Raises `CheckpointError` for any other state."""
    state: Any = own.sidecar["exchange"]
    if kind == "averaging":
        return _averages(own.step, state)
    if state.get("residuals") if kind == "model_server" else state:
        raise CheckpointError(
            f"the checkpoint of step {own.step} has gradients that compression has not sent, of each worker's own part: resume "
            "with the same number of groups"
        )
    return dict(state)


def _averages(step: int, state: Mapping[str, Value]) -> dict[str, Value]:
    """Averages that had arrived but were not applied are the same in all groups, too. What was sent for them is not, but only
    elastic averaging still needs it."""
    found: dict[str, Value] = {}
    for name, value in state.items():
        kind, _, number = name.partition("/")
        under_way = kind in ("own", "came") and f"center/{number}" not in state
        if kind not in _ALIKE and not under_way:
            raise CheckpointError(
                f"the checkpoint of step {step} has what rounding has lost, or elastic averages that were under way "
                "([exchange.averaging] deltas, overlap_steps), of each group's own: resume with the same number of groups"
            )
        found[name] = state[f"came/{number}"] if kind == "own" else value
    return found
