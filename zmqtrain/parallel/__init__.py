"""Model, batch and domain parallelism inside a compute group (Gholami et al. 2018): layers divided over a Pr x Pc grid.

The names below are imported when they are first used, since plans and grids do not need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zmqtrain.parallel.communicator import Communicator, Fabric
    from zmqtrain.parallel.grid import Grid
    from zmqtrain.parallel.network import NetworkFabric
    from zmqtrain.parallel.placed.model import ParallelModel, parallelize
    from zmqtrain.parallel.plan import LayerPlan, Plan
    from zmqtrain.parallel.shard import Shard
    from zmqtrain.parallel.sums import sum_gradients

__all__ = [
    "Communicator",
    "Fabric",
    "Grid",
    "LayerPlan",
    "NetworkFabric",
    "ParallelModel",
    "Plan",
    "Shard",
    "parallelize",
    "sum_gradients",
]

_HOME = {
    "Communicator": "communicator",
    "Fabric": "communicator",
    "Grid": "grid",
    "LayerPlan": "plan",
    "NetworkFabric": "network",
    "ParallelModel": "placed.model",
    "Plan": "plan",
    "Shard": "shard",
    "parallelize": "placed.model",
    "sum_gradients": "sums",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
