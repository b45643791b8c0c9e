"""An optimizer's state as named tensors: for checkpoints, and for a worker that takes the place of another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.errors import CheckpointError, TaskError
from zmqtrain.exchange.optimizer import require_state

ANOTHER_MODEL = "it belongs to another model; use a checkpoint of this model, or start without it"


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything that the optimizer keeps, as tensors named ``optimizer/KEY/PARAMETER``; numbers become tensors. Raises `TaskError`
    for a state that has something else."""
    require_kept_state(optimizer)
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"optimizer/{key}/{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return tensors


def require_kept_state(optimizer: Optimizer) -> None:
    """Raise `TaskError` if the optimizer's state has something that a checkpoint cannot hold."""
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if value is not None and not isinstance(value, Tensor | int | float):
                raise TaskError(
                    f"the optimizer {type(optimizer).__qualname__} keeps {key!r} in optimizer.state, which is a "
                    f"{type(value).__name__}, but checkpoints hold only tensors and numbers: keep it as one of these, or leave out "
                    "checkpoints ([job] checkpoint_every = 0)"
                )


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Continue with what `optimizer_state` has returned. Raises `CheckpointError` if it does not fit."""
    parameters = dict(model.named_parameters())
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    states: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        kind, _, rest = full.partition("/")
        key, _, name = rest.partition("/")
        if kind != "optimizer" or name not in parameters or id(parameters[name]) not in groups:
            raise CheckpointError(
                f"the checkpoint's optimizer has state for {full!r:.100}, which this model does not have: {ANOTHER_MODEL}"
            )
        states.setdefault(name, {})[key] = tensor
    for name, state in states.items():
        parameter = parameters[name]
        require_state(optimizer, name, parameter, state)
        group = groups[id(parameter)]
        for key, tensor in state.items():
            if key == "step" and not (group.get("capturable") or group.get("fused")):
                pass  # step counters stay on the CPU
            elif tensor.shape == parameter.shape and tensor.dtype == parameter.dtype:
                tensor = torch.empty_like(parameter).copy_(tensor)
            else:
                tensor = tensor.to(parameter.device)
            optimizer.state[parameter][key] = tensor
