"""What checkpoints keep of each group, for a run with another number of groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zmqtrain.collectives.group import bounds
from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.checkpoint_part import kept_payload, kept_value
from zmqtrain.wire.compress.powersgd import RIGHTS
from zmqtrain.wire.payload import Value
from zmqtrain.wire.tensor import TensorPayload

#: What averaging keeps, the same in all groups.
_ALIKE = ("center", "last", "momentum")
#: With what the names begin of what each worker has lost by rounding, or has still to send.
_UNSENT: Mapping[str, tuple[str, ...]] = {"averaging": ("lost/",), "allreduce": ("sent/", "lost/")}


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


def has_unsent(kind: str, state: Mapping[str, Any]) -> bool:
    """Whether an exchange's state has something that each worker still has to send, by itself."""
    if kind == "model_server":
        return bool(state.get("residuals"))
    return any(name.startswith(_UNSENT[kind]) for name in state) if kind in _UNSENT else False


def regrouped(
    kind: str, step: int, state: Mapping[str, Any], others: Sequence[Mapping[str, Any]], *, ranks: int, share: float
) -> dict[str, Value]:
    """An exchange's state for a run with another number of groups.

    ``state``: of one of the old workers. ``others``: if it `has_unsent`, of all old workers that exchanged the same elements, by
    rank. ``ranks``: how many do so now. ``share``: what each of these has to send, as a part of the mean of what the old ones had.
    Raises `CheckpointError` for what cannot be given to others."""
    if kind == "model_server":
        unsent = [each.get("residuals", {}) for each in others]
        return {**state, "residuals": _means(unsent, share)} if others else dict(state)
    if others and ranks == 1:
        raise CheckpointError(
            f"the checkpoint of step {step} has gradients that compression has not sent, which one worker alone never does: "
            "resume with more groups, or with as many as before"
        )
    if kind == "averaging":
        of_rounding = [{name.removeprefix("lost/"): value for name, value in each.items()} for each in others]
        found = {f"lost/{name}": value for name, value in _rounding(of_rounding, ranks).items()}
        return _averages(step, {name: value for name, value in state.items() if not name.startswith("lost/")}) | found
    factors = {name for name in state if name.startswith(("lost/", "right/"))}
    if factors:
        return _means([{name: value for name, value in each.items() if name in factors} for each in others], share)
    return _rounding(others, ranks)


def _means(states: Sequence[Mapping[str, Any]], share: float) -> dict[str, Value]:
    """The means of what was not sent, in parts. What PowerSGD begins with is no such thing: any worker's will do."""
    found: dict[str, Value] = {}
    for name, value in states[0].items():
        if name.startswith("right/") or name.endswith(RIGHTS):
            found[name] = value
            continue
        found[name] = _packed(_mean(name, [_tensor(name, state) for state in states]) * share)
    return found


def _rounding(states: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, Value]:
    """Of `zmqtrain.exchange.rounded_mean.RoundedMean`: what each rank lost of each part, and each part's owner of its mean. All
    new ranks have the same to send, the mean of that."""
    if not states:
        return {}
    found: dict[str, Value] = {}
    numbers = {name.split("/")[1] for name in states[0] if name.startswith("sent/")}
    for number in sorted(numbers, key=int):
        parts = [f"sent/{number}/{rank}" for rank in range(len(states))]
        wholes = [torch.cat([_tensor(part, state) for part in parts]) for state in states]
        whole = _mean(f"sent/{number}", wholes)
        whole += torch.cat([_tensor(f"mean/{number}", state) for state in states])
        for rank, (start, stop) in enumerate(bounds(whole.numel(), ranks)):
            found[f"sent/{number}/{rank}"] = _packed(whole[start:stop])
    return found


def _tensor(name: str, state: Mapping[str, Any]) -> Tensor:
    if name not in state:
        raise CheckpointError(f"the checkpoint lacks {name} of what a worker had not sent: resume with as many groups as before")
    return kept_payload(name, state[name]).tensor


def _packed(tensor: Tensor) -> Value:
    return kept_value(TensorPayload.of(tensor.contiguous()))


def _averages(step: int, state: Mapping[str, Any]) -> dict[str, Value]:
    """Averages that had arrived but were not applied are the same in all groups, too. What was sent for them is not, but only
    elastic averaging still needs it."""
    found: dict[str, Value] = {}
    for name, value in state.items():
        kind, _, number = name.partition("/")
        under_way = kind in ("own", "came") and f"center/{number}" not in state
        if kind not in _ALIKE and not under_way:
            raise CheckpointError(
                f"the checkpoint of step {step} has elastic averages that were under way ([exchange.averaging] overlap_steps), of "
                "each group's own: resume with the same number of groups"
            )
        found[name] = state[f"came/{number}"] if kind == "own" else value
    return found
