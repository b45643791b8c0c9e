"""Model, batch and domain parallelism inside a compute group (Gholami et al. 2018): layers divided over a Pr x Pc grid."""

from zmqtrain.parallel.communicator import Communicator, Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.network import NetworkFabric
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.parallel.rewrite.model import ParallelModel, parallelize
from zmqtrain.parallel.shard import Shard, sum_gradients

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
