"""What goes on between groups of ranks, as a framework's training loop runs it beside DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zmqtrain.c10d.averaging import Averaging
from zmqtrain.c10d.groups import average_over_ranks
from zmqtrain.c10d.hook import Gossip, ddp_comm_hook
from zmqtrain.c10d.servers import ModelServers
from zmqtrain.errors import UsageError

#: As ``[exchange] kind`` in a topology file.
Kind = Literal["gossip", "model_server", "averaging"]


def require_kind(kind: str) -> None:
    """Raises `UsageError` for an unknown kind."""
    if kind not in get_args(Kind):
        raise UsageError(f"exchange is {kind!r}; it must be one of {', '.join(get_args(Kind))}")


def require_fit(kind: Kind, optimizers: Sequence[Optimizer], *, clips: str = "", scales: bool = False) -> None:
    """Raises `UsageError` if a training loop does what the exchange would ignore.

    ``clips``: the argument that makes it clip gradients; empty: it does not. ``scales``: whether it scales losses (fp16).
    """
    if kind != "model_server":
        return
    if len(optimizers) != 1:
        raise UsageError(f"model servers run one optimizer, but there are {len(optimizers)}")
    if clips:
        raise UsageError(f"gradients leave for the model servers during backward, before they are clipped: leave out {clips}")
    if scales:
        raise UsageError("model servers take gradients unscaled: use bf16, or float32, in place of fp16")


class Between:
    """One run's exchange between groups. All ranks make one, at the same point of the program."""

    def __init__(self, kind: Kind, model: nn.Module, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
        """All ranks' models become equal. ``options``: arguments of `Gossip`, `ModelServers` or `Averaging`.

        Raises `ValueError`, `TypeError` or `TaskError` for options, a world or an optimizer that do not fit.
        """
        self._state: Gossip | ModelServers | Averaging
        if kind == "gossip":
            self._state = Gossip(**options)
            self._state.average(model)
        elif kind == "averaging":
            self._state = Averaging(model, **options)
        else:
            self._state = ModelServers(model, optimizer, **options)

    @property
    def within(self) -> Any:
        """The process group of this rank's own group, for DistributedDataParallel."""
        return self._state.within

    @property
    def takes_the_step(self) -> bool:
        """Whether `step` stands in place of the optimizer's."""
        return isinstance(self._state, ModelServers)

    def attach(self, replica: DistributedDataParallel) -> None:
        """Hand gradients over during backward."""
        replica.register_comm_hook(self._state, ddp_comm_hook)

    def step(self) -> None:
        """The optimizer has made its step, or this stands in its place."""
        if not isinstance(self._state, Gossip):
            self._state.step()

    def align(self, model: nn.Module) -> None:
        """Give all ranks one model, to be evaluated or saved: the mean of theirs. All ranks call it."""
        average_over_ranks(model)
        if isinstance(self._state, ModelServers):
            self._state.accept()

    def close(self, error: BaseException | None = None) -> None:
        """Training is over. Without an error all ranks call it, and wait for each other."""
        if isinstance(self._state, ModelServers):
            self._state.__exit__(type(error) if error else None, error, None)
