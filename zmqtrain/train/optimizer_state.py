"""An optimizer's state as named tensors: for checkpoints, and for a worker that takes the place of another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.errors import CheckpointError, TaskError
from zmqtrain.exchange.optimizer import is_torchs_own, require_state

ANOTHER_MODEL = "it belongs to another model; use a checkpoint of this model, or start without it"

#: What schedules set.
_SCHEDULED = frozenset({"lr", "initial_lr", "momentum", "weight_decay"})
#: Attributes of every optimizer.
_TORCHS = frozenset({"defaults", "param_groups", "state"})


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


def beside_state(optimizer: Optimizer) -> dict[str, object]:
    """What an optimizer has beside the ``state`` of each parameter, such that changes show: in its groups, as attributes of its
    own, and in ``state`` under other keys."""
    groups, known = enumerate(optimizer.param_groups), {p for group in optimizer.param_groups for p in group["params"]}
    values = {f"{key}/{number}": value for number, group in groups for key, value in group.items() if key != "params"}
    values |= {key: value for key, value in vars(optimizer).items() if key[0] != "_" and key not in _TORCHS}
    values |= {f"state[{key!r:.40}]": value for key, value in optimizer.state.items() if key not in known}
    return {key: _shown(value) for key, value in values.items() if isinstance(value, int | float | Tensor | list | tuple | dict)}


def _shown(value: object) -> object:
    """Something that does not change with ``value``, and is another one if that changes."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, Tensor) and value.numel() and not value.is_complex():
        return float(value.detach().double().norm())
    if isinstance(value, list | tuple | dict):
        return [_shown(each) for each in (value.values() if isinstance(value, dict) else value)]
    return None


def forgotten_warning(optimizer: Optimizer, before: Mapping[str, object], scheduled: bool) -> str | None:
    """A warning about values that a checkpoint does not hold, although they have changed since `beside_state` returned ``before``;
    ``None`` if there are none. ``scheduled``: a schedule sets rates, and does so again in a resumed run."""
    if is_torchs_own(optimizer):
        return None
    now = beside_state(optimizer)
    changed = dict.fromkeys(key.partition("/")[0] for key, value in now.items() if before.get(key) != value)
    names = [repr(key) for key in changed if not (scheduled and key in _SCHEDULED)]
    if not names:
        return None
    return (
        f"the optimizer {type(optimizer).__qualname__} changes {', '.join(names)} beside its state, which checkpoints do not hold: "
        "a resumed run begins with the first values. Keep what must go on in optimizer.state[parameter]"
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
