"""Lightning: ``import zmqtrain.integrations.lightning`` registers the strategy ``zmqtrain``.

::

    Trainer(strategy="zmqtrain", ...)                                         # DistributedDataParallel over the zmq backend
    Trainer(strategy=ZmqStrategy("gossip", group_size=2), ...)                # and groups of 2 ranks that gossip
    Trainer(strategy=ZmqStrategy("averaging", options={"every": 50}), ...)    # DiLoCo between hosts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.optim import Optimizer

from zmqtrain.c10d.register import BACKEND, register
from zmqtrain.errors import UsageError
from zmqtrain.integrations.between import Between, Kind, require_fit, require_kind

NAME = "zmqtrain"


class ZmqStrategy(DDPStrategy):  # type: ignore[misc]
    """DistributedDataParallel over the ``zmq`` backend; with an exchange, within groups of ranks only.

    Before it evaluates or saves, all ranks take the mean of the groups' models, and train on from there.
    """

    strategy_name = NAME

    def __init__(
        self, exchange: Kind | None = None, group_size: int | None = None, *, options: Mapping[str, Any] | None = None, **ddp: Any
    ) -> None:
        """
        Args:
            exchange: what goes on between groups of ranks: ``gossip``, ``model_server`` or ``averaging``; ``None``: there is one
                group, of all ranks.
            group_size: the number of consecutive ranks in a group; by default those of a host.
            options: further arguments of `zmqtrain.Gossip`, `zmqtrain.ModelServers` or `zmqtrain.Averaging`.
            ddp: arguments of Lightning's `DDPStrategy`.

        Raises `UsageError` for an unknown exchange, and for arguments that would have no effect.
        """
        if exchange is not None:
            require_kind(exchange)
            for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period", "process_group"):
                if ddp.get(name) is not None:
                    raise UsageError(f"{name} has no effect with exchange={exchange!r}, which says what happens to gradients")
        elif group_size is not None or options:
            raise UsageError("group_size and options are of an exchange: pass exchange, too")
        register()
        super().__init__(**{"process_group_backend": BACKEND, **ddp})
        self._exchange, self._options = exchange, {**(options or {}), "group_size": group_size}
        self._between: Between | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Called for each class by Lightning, and here."""
        strategy_registry.register(NAME, cls, description="DDP over the zmq backend", override=True)

    def configure_ddp(self) -> None:
        if self._exchange is None:
            super().configure_ddp()

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if self._exchange is None:
            return
        scales = getattr(self.precision_plugin, "scaler", None) is not None
        clips = "gradient_clip_val" if trainer.gradient_clip_val else ""
        require_fit(self._exchange, self.optimizers, clips=clips, scales=scales)
        self._between = Between(self._exchange, self.model, self.optimizers[0], self._options)
        self._ddp_kwargs["process_group"] = self._between.within
        super().configure_ddp()
        self._between.attach(self.model)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        between = self._between
        if between is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if between.takes_the_step:
            return super().optimizer_step(_Elsewhere(optimizer, between), closure, model, **kwargs)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        between.step()
        return result

    def on_validation_start(self) -> None:
        self._align()
        super().on_validation_start()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._align()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def on_train_end(self) -> None:
        self._align()
        if self._between is not None:
            self._between.close()
            self._between = None
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        between, self._between = self._between, None
        if between is not None:
            between.close(exception)
        super().on_exception(exception)

    def _align(self) -> None:
        """All ranks call what Lightning calls this in, also to save a checkpoint."""
        if self._between is not None:
            with torch.no_grad():
                self._between.align(self.lightning_module)


class _Elsewhere:
    """An optimizer whose steps are made elsewhere. All but `step` is the optimizer's."""

    def __init__(self, optimizer: Optimizer, between: Between) -> None:
        self._optimizer, self._between = optimizer, between

    def step(self, closure: Callable[[], Any], **_: Any) -> Any:
        result = closure()
        self._between.step()
        # Schedulers warn if no step came before theirs.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


ZmqStrategy.register_strategies(StrategyRegistry)
