"""``import zmqtrain.c10d`` makes ``zmq`` a backend of `torch.distributed`::

    import torch.distributed as dist
    import zmqtrain.c10d

    dist.init_process_group("zmq")      # in place of "gloo"; also under torchrun

Ranks of one host meet in shared memory. Between hosts each rank talks over ZeroMQ about a slice of its host's sums; it is found at
the address of the interface that leads to ``MASTER_ADDR``, or at ``ZMQTRAIN_HOST``. It listens there, or at ``ZMQTRAIN_BIND``; at
all its addresses where ``ZMQTRAIN_HOST`` is none of its own (NAT, a name). ``ZMQTRAIN_PORTS`` (``29400-29500``) says which ports.
"""

from zmqtrain.c10d.process_group import ZmqProcessGroup
from zmqtrain.c10d.register import BACKEND, register

__all__ = ["BACKEND", "ZmqProcessGroup"]

register()
