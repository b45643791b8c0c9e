"""Parameters without a gradient, which torch's optimizers skip. Some modes cannot tell them from others (`what_blinds`)."""

from __future__ import annotations

from zmqtrain.topology.schema import Topology
from zmqtrain.train.replica import TorchReplica

#: Options with which an optimizer changes a parameter whose gradient is zero.
_GOES_ON = ("weight_decay", "momentum", "betas", "lambd")
#: A warning lists this many names before it counts the rest.
MOST_LISTED = 3


def what_blinds(topology: Topology) -> str:
    """Why gradients cannot show that no backward has reached a parameter (`zmqtrain.collectives.unreached`), in words; empty if
    they can."""
    exchange = topology.exchange
    # Such compression loses the sign of zeros, as does whatever adds the rounding errors of earlier steps.
    loses = exchange.compression not in ("none", "fp16", "bf16")
    adds = exchange.kind == "allreduce" and exchange.compression != "none"
    return "this [exchange] compression" if loses or adds else ""


def unreached_warning(replica: TorchReplica, blind: str) -> str | None:
    """A warning about parameters that the last step's backward has not reached on this worker; ``None`` if there are none, or if a
    gradient of zeros has the same effect as no gradient. ``blind``: see `what_blinds`."""
    groups = {id(parameter): group for group in replica.optimizer.param_groups for parameter in group["params"]}
    names = [
        name for name in replica.unreached if any(groups.get(id(replica.named[name]), {}).get(setting) for setting in _GOES_ON)
    ]
    if not names:
        return None
    more = f", and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    listed = ", ".join(names[:MOST_LISTED])
    return (
        f"the backward pass of the first step gave no gradient to {listed}{more}. PyTorch alone leaves such parameters unchanged; "
        f"with {blind} their gradient is zero unless another worker has one, so weight decay and momentum still change them. "
        "Freeze parameters that are never used: requires_grad_(False)"
    )
