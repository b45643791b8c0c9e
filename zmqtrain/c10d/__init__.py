"""The backend ``zmq`` of `torch.distributed`, which torch finds by itself where zmqtrain is installed::

    dist.init_process_group("zmq")      # in place of "gloo"; also under torchrun

Where torch looks for no backends (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``, or zmqtrain is on the path but not installed), ``import
zmqtrain.c10d`` registers it.

Ranks of one host share memory. Between hosts each rank exchanges a slice of its host's sums over ZeroMQ. Other hosts find a rank at
the address of the interface that leads to torch's store (``MASTER_ADDR``), or at ``ZMQTRAIN_HOST``. It listens there, or at
``ZMQTRAIN_BIND``, or on all its addresses if ``ZMQTRAIN_HOST`` is not one of them (NAT, a name). ``ZMQTRAIN_PORTS``
(``29400-29500``) sets the ports. Connections are encrypted; with ``ZMQTRAIN_TOKEN`` only processes that have it are believed
(docs/security.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zmqtrain.c10d.register import BACKEND, register

if TYPE_CHECKING:
    from zmqtrain.c10d.process_group import ZmqProcessGroup

__all__ = ["BACKEND", "ZmqProcessGroup"]


def __getattr__(name: str) -> Any:
    # Not imported above: torch imports this package while it is being imported itself.
    if name == "ZmqProcessGroup":
        from zmqtrain.c10d.process_group import ZmqProcessGroup

        return ZmqProcessGroup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
