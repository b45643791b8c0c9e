"""``import zmqtrain.c10d`` makes ``zmq`` a backend of `torch.distributed`::

    import torch.distributed as dist
    import zmqtrain.c10d

    dist.init_process_group("zmq")      # in place of "gloo"; also under torchrun

Ranks of one host share memory. Between hosts each rank exchanges a slice of its host's sums over ZeroMQ. Other hosts find a rank at
the address of the interface that leads to ``MASTER_ADDR``, or at ``ZMQTRAIN_HOST``. It listens there, or at ``ZMQTRAIN_BIND``, or
on all its addresses if ``ZMQTRAIN_HOST`` is not one of them (NAT, a name). ``ZMQTRAIN_PORTS`` (``29400-29500``) sets the ports.
"""

from zmqtrain.c10d.process_group import ZmqProcessGroup
from zmqtrain.c10d.register import BACKEND, register

__all__ = ["BACKEND", "ZmqProcessGroup"]

register()
