"""``import zmqtrain.c10d`` makes ``zmq`` a backend of `torch.distributed`::

    import torch.distributed as dist
    import zmqtrain.c10d

    dist.init_process_group("zmq")      # in place of "gloo"; also under torchrun

Ranks of one host meet in shared memory.
"""

from zmqtrain.c10d.process_group import ZmqProcessGroup
from zmqtrain.c10d.register import BACKEND, register

__all__ = ["BACKEND", "ZmqProcessGroup"]

register()
