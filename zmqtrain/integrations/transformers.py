"""The Trainer of transformers, with groups of ranks that gossip, use model servers or average::

init_process_group()                    # zmqtrain.integrations.accelerate, before TrainingArguments(...)
...
trainer = Trainer(...)
exchange(trainer, "gossip", group_size=2)
trainer.train()
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback

from zmqtrain.c10d.groups import Groups
from zmqtrain.errors import UsageError
from zmqtrain.integrations.between import Between, Kind, require_fit, require_kind
from zmqtrain.words import typed


def exchange(trainer: Trainer, kind: Kind, *, group_size: int | None = None, **options: Any) -> None:
    """From now on ranks average gradients within their groups only; ``kind`` says what groups exchange. All ranks call it.

    Before the trainer evaluates or saves, all ranks take the mean of the groups' models, and train on from there.

    Args:
        trainer: not training yet.
        kind: ``gossip``, ``model_server`` or ``averaging``.
        group_size: the number of consecutive ranks in a group; by default those of a host.
        options: further arguments of `zmqtrain.Gossip`, `zmqtrain.ModelServers` or `zmqtrain.Averaging`.

    Raises `UsageError` if there is no process group, or the trainer does something that would have no effect.
    """
    require_kind(kind)
    if not dist.is_initialized():
        raise UsageError("there is no process group: start the program with torchrun, and call init_process_group() of ours first")
    handler = trainer.accelerator.ddp_handler
    if handler is None:
        raise UsageError("the trainer does not use DistributedDataParallel")
    trainer.accelerator.ddp_handler = _WithinGroup(handler, Groups(group_size).within)
    trainer.add_callback(_Callback(trainer, kind, {**options, "group_size": group_size}))


class _WithinGroup:
    """Arguments of DistributedDataParallel, which Accelerate has no place for a process group in."""

    def __init__(self, handler: Any, within: Any) -> None:
        self._handler, self._within = handler, within

    def to_kwargs(self) -> dict[str, Any]:
        return {**self._handler.to_kwargs(), "process_group": self._within}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


class _Callback(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: Trainer, kind: Kind, options: dict[str, Any]) -> None:
        self._trainer, self._kind, self._options = trainer, kind, options
        self._between: Between | None = None
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        replica, optimizer = self._trainer.model_wrapped, found["optimizer"]
        if not isinstance(replica, DistributedDataParallel):
            raise UsageError(f"groups exchange beside DistributedDataParallel, but the trainer has made {typed(replica)}")
        inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
        clips = "max_grad_norm (its default clips: pass max_grad_norm=0)" if args.max_grad_norm else ""
        scales = getattr(optimizer, "scaler", None) is not None
        require_fit(self._kind, [inner], clips=clips, scales=scales)
        self._between = Between(self._kind, replica.module, inner, self._options)
        self._between.attach(replica)
        if self._between.takes_the_step:
            self._hook = inner.register_step_pre_hook(self._step_elsewhere)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        if self._between is not None and not self._between.takes_the_step:
            self._between.step()

    def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self._align_for(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self._align_for(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        if self._between is not None:
            self._align()
            self._between.close()
            self._between = None
        if self._hook is not None:
            self._hook.remove()

    def _step_elsewhere(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before the optimizer's own step, which then finds no gradients and does nothing."""
        assert self._between is not None
        self._between.step()
        optimizer.zero_grad(set_to_none=True)

    def _align_for(self, control: Any) -> None:
        # The trainer's own callback, which is the first, has decided.
        if control.should_evaluate or control.should_save:
            self._align()

    def _align(self) -> None:
        if self._between is not None:
            with torch.no_grad():
                self._between.align(self._trainer.model_wrapped.module)
