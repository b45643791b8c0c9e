"""Detects and refuses forbidden changes to a replicated model and optimizer, and uses that model servers do not support."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.errors import TaskError
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.optimizer import describe_optimizer, require_no_step_hooks
from zmqtrain.train.replica import TorchReplica

LOCAL = '[exchange] kind = "allreduce", "gossip" or "averaging"'


def check_optimizer(model: nn.Module, optimizer: Optimizer, *, served: bool) -> None:
    """Raise `TaskError` for an optimizer that a session cannot run correctly. ``served``: model servers run it."""
    of_model = {id(parameter) for parameter in model.parameters()}
    in_optimizer = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in of_model for parameter in in_optimizer)
    if foreign and foreign < len(in_optimizer):  # all of them: the replica says so
        raise TaskError(
            f"{foreign} of the optimizer's parameters do not belong to the model, so they would not be exchanged: put everything "
            f"that is trained into one nn.Module, and replicate that"
        )
    check_hooks(model.named_parameters(), own=0)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    shared = [name for name, each in trained if each.device.type == "cpu" and each.is_shared()]  # type: ignore[no-untyped-call]
    if shared:
        raise TaskError(
            f"the parameter {shared[0]!r} has memory that is shared with other processes (share_memory(), torch.multiprocessing); "
            "session.replicate() moves parameters, so these processes would not see them change: replicate a copy "
            "(copy.deepcopy(model)), and copy its parameters into the shared model when you need them there (load_state_dict)"
        )
    if not served:
        return
    if optimizer.state:
        raise TaskError(
            "the optimizer has state already (it was loaded, or has made steps), but model servers, which run it, begin without "
            f"state: replicate a new optimizer, or use {LOCAL}, with which it keeps its state"
        )
    require_no_step_hooks(optimizer)


def check_hooks(parameters: Iterable[tuple[str, nn.Parameter]], *, own: int) -> None:
    """Raise `TaskError` if a parameter has more than our ``own`` hooks that are called when backward has added to its gradient;
    optimizers run within ``backward()`` by such hooks."""
    for name, parameter in parameters:
        if len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) > own:
            raise TaskError(
                f"the parameter {name!r} has a hook of register_post_accumulate_grad_hook(), which would see only this worker's "
                f"part of the gradient: do its work after backward(), with session.replicate(model, optimizer, overlap=False)"
            )


class Guards:
    """The checks of one replica: `check` before each ``optimizer.step()``, `passed` after it."""

    def __init__(self, replica: TorchReplica, *, served: bool) -> None:
        self._replica, self._served = replica, served
        model, optimizer = replica.model, replica.optimizer
        trained = {id(parameter) for parameter in replica.parameters}
        grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._frozen = [(n, p) for n, p in model.named_parameters() if p.numel() and id(p) in grouped and id(p) not in trained]
        self._others = [(n, p) for n, p in model.named_parameters() if id(p) not in grouped and id(p) not in trained]
        self._others_versions = [p._version for _, p in self._others]
        self._groups = self._group_sizes()
        self._versions: list[int] = []
        self._sample: Tensor | None = None
        self._kept: list[Tensor] = []
        self._had: set[str] = set()  # parameters that had a gradient in some step
        self._lacked: set[str] = set()  # parameters that had none in some step
        self._undo: list[Callable[[], None]] = []
        if served:
            hooks = (
                optimizer.register_state_dict_pre_hook(self._no_state),
                optimizer.register_load_state_dict_pre_hook(self._no_new_state),
            )
            self._undo += [hook.remove for hook in hooks]
            state, optimizer.state = optimizer.state, _NoState()
            self._undo.append(lambda: setattr(optimizer, "state", state))

    def release(self) -> None:
        while self._undo:
            self._undo.pop()()

    def check(self, *, sampled: bool) -> None:
        """Raise `TaskError` for a forbidden change. Moves parameters whose memory was replaced back into the buckets. ``sampled``:
        the parameters of the last step are complete, and may be read."""
        if self._group_sizes() != self._groups:
            raise TaskError(
                "optimizer.add_param_group() after session.replicate(): the new parameters would not be exchanged. Add all "
                "groups before; parameters may be frozen (requires_grad_(False)) in the meantime, with overlap=False"
            )
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise TaskError(
                f"the parameter {thawed[0]!r} was frozen at session.replicate(), but is trained now: it would not be exchanged. "
                f"Call replicate() before you freeze; frozen parameters then get no updates, with overlap=False"
            )
        for (name, parameter), version in zip(self._others, self._others_versions, strict=True):
            if parameter._version != version and parameter.grad is not None:
                raise TaskError(
                    f"the parameter {name!r} is trained, but not by the optimizer that was given to session.replicate(), so its "
                    "gradients were this worker's own: give replicate() one optimizer with all parameters, in several groups"
                )
        self._others_versions = [parameter._version for _, parameter in self._others]
        if self._served:
            require_no_step_hooks(self._replica.optimizer)
            if not isinstance(self._replica.optimizer.state, _NoState):
                raise _no_state("optimizer.state was replaced")
        self.check_weights(sampled=sampled)

    def check_weights(self, *, sampled: bool) -> None:
        """Like `check`, but for weights only."""
        replaced = self._replica.memory.bind()
        if self._served:
            self._check_weights(replaced, sampled)

    def passed(self, *, sampled: bool, keep: bool) -> None:
        """Call this after a step. ``sampled``: all parameters are complete, and may be read. ``keep``: weights may be changed for
        a while, if they are restored before the next step."""
        if not self._served:
            return
        self._versions = [parameter._version for parameter in self._replica.parameters]
        self._sample = (
            self._replica.memory.sample_parameters() if sampled and self._replica.parameters[0].device.type == "cpu" else None
        )
        self._kept = [flat.clone() for flat in self._replica.memory.flat_parameters()] if sampled and keep else []

    def check_there(self, without: Collection[str]) -> None:
        """Raise `TaskError` if one of the parameters ``without`` a gradient is not the model's any more."""
        if not without:
            return
        there = set(map(id, self._replica.model.parameters()))
        gone = [name for name in without if id(self._replica.named[name]) not in there]
        if gone:
            raise TaskError(
                f"the parameter {gone[0]!r} of session.replicate() is not in the model any more: a layer was replaced, or its "
                "parametrization removed. The new parameters would be neither exchanged nor trained. Change the model before "
                "session.replicate(), or copy new values into the parameters that there are"
            )

    def check_unused(self, without: frozenset[str]) -> None:
        """Raise `TaskError` if parameters lack a gradient: an optimizer skips them, but servers would see zeros."""
        if not self._served:
            return
        optimizer = self._replica.optimizer
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in self._replica.named.items():
            group = group_of[id(parameter)]
            forgetful = type(optimizer) is torch.optim.SGD and not group["dampening"]  # zeros before the first gradient are nothing
            if name not in without:
                wrong = name in self._lacked and not forgetful
                self._had.add(name)
            else:
                wrong = bool(group.get("weight_decay")) or (name in self._had and not (forgetful and not group["momentum"]))
                self._lacked.add(name)
            if wrong:
                raise TaskError(
                    f"the parameter {name!r} has no gradient in some steps. An optimizer skips such parameters, but model "
                    f"servers see zeros, by which their optimizer would move it (momentum, weight decay, Adam's averages): use "
                    f"{LOCAL}"
                )

    def _check_weights(self, replaced: list[str], sampled: bool) -> None:
        replica = self._replica
        if not self._versions:
            return
        changed = [
            name
            for (name, parameter), version in zip(replica.named.items(), self._versions, strict=True)
            if parameter._version != version or name in replaced
        ]
        if not changed and (not sampled or self._sample is None or _same(self._sample, replica.memory.sample_parameters())):
            return
        if self._kept and all(map(_restored, self._kept, replica.memory.flat_parameters())):
            return
        raise TaskError(
            f"weights were changed by hand ({changed[0] if changed else 'through .data'}), but model servers hold the parameters "
            f"and would undo it: use {LOCAL}; or restore them before optimizer.step(), with session.replicate(..., overlap=False)"
        )

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self._replica.optimizer.param_groups]

    def _no_state(self, optimizer: Optimizer) -> None:
        raise _no_state("optimizer.state_dict()")

    def _no_new_state(self, optimizer: Optimizer, state: object) -> None:
        raise TaskError(
            "optimizer.load_state_dict(): the model servers run the optimizer and have its state. Resume the run from a checkpoint "
            f"of it (--resume); or use {LOCAL}"
        )


class _NoState(defaultdict[Any, Any]):
    """``optimizer.state`` where model servers have it: any use raises `TaskError`."""

    def _used(self, *arguments: object, **keywords: object) -> Any:
        raise _no_state("optimizer.state")

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __missing__ = __ior__ = _used
    get = setdefault = pop = popitem = clear = update = copy = keys = values = items = __copy__ = __reduce__ = _used

    def __bool__(self) -> bool:
        return bool(self._used())


def _no_state(what: str) -> TaskError:
    return TaskError(
        f"{what}: the model servers run the optimizer and have its state, so this worker has none: do without it, or use "
        f"{LOCAL}, with which the script has the state"
    )


def _same(kept: Tensor, now: Tensor) -> bool:
    return torch.allclose(kept, now, rtol=0.0, atol=0.0, equal_nan=True)  # training itself may have made them NaN


def _restored(kept: Tensor, now: Tensor) -> bool:
    eps = torch.finfo(now.dtype).eps
    return torch.allclose(kept, now, rtol=16 * eps, atol=16 * eps * float(kept.abs().max()))


def settings_of(optimizer: Optimizer) -> OptimizerSpec | None:
    """The optimizer's hyperparameters; None if one of them is not a plain value."""
    try:
        return describe_optimizer(optimizer)
    except TaskError:
        return None


def checksum(value: object) -> int:
    """A checksum of the ``repr`` of ``value``."""
    return zlib.crc32(repr(value).encode())
