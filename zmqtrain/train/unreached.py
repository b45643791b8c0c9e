"""Parameters without a gradient: an optimizer of torch's passes over them. In some modes nobody can tell (`what_blinds`)."""

from __future__ import annotations

from zmqtrain.topology.schema import Topology
from zmqtrain.train.replica import TorchReplica

#: What, where an optimizer has it, changes a parameter whose gradient is zero.
_GOES_ON = ("weight_decay", "momentum", "betas", "lambd")
#: Names that a warning lists before it says how many more there are.
MOST_LISTED = 3


def what_blinds(topology: Topology) -> str:
    """In words, what keeps gradients from saying that nothing has reached a parameter (`zmqtrain.exchange.unreached`); empty:
    nothing does."""
    exchange, compute = topology.exchange, topology.compute
    if exchange.compression in ("int8", "topk"):
        return "this [exchange] compression"  # zeros have no sign then
    if exchange.kind == "model_server" and compute.rows > 1:
        return "a model that a grid divides at model servers"  # pieces of different rows begin anywhere in a parameter
    return ""


def unreached_warning(replica: TorchReplica, blind: str) -> str | None:
    """What to say of parameters that the last step's backward has not reached on this worker; ``None`` where there are none, or
    where a gradient of zeros does what none does. ``blind``: `what_blinds`."""
    groups = {id(parameter): group for group in replica.optimizer.param_groups for parameter in group["params"]}
    names = [
        name for name in replica.unreached if any(groups.get(id(replica.named[name]), {}).get(setting) for setting in _GOES_ON)
    ]
    if not names:
        return None
    more = f", and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    listed = ", ".join(names[:MOST_LISTED])
    return (
        f"the backward pass of the first step gave no gradient to {listed}{more}. PyTorch alone leaves such a parameter as it is; "
        f"with {blind} its gradient is zero unless another worker has one, and weight decay and momentum go on. "
        "Freeze what is never used: requires_grad_(False)"
    )
