"""Which runs can carry on without workers that are lost. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqtrain.topology.broken_rule import Path

if TYPE_CHECKING:
    from zmqtrain.topology.schema import Topology

#: The exchanges that form their groups anew.
_KINDS = ("gossip", "averaging")


def why_not_elastic(topology: Topology) -> tuple[str, tuple[Path, ...]] | None:
    """Why the run cannot carry on without a lost worker, and the fields on which that depends; ``None`` if it can."""
    exchange, compute = topology.exchange, topology.compute
    if exchange.kind not in _KINDS:
        kinds = " or ".join(f'"{kind}"' for kind in _KINDS)
        return (
            f'with kind = "{exchange.kind}" all workers would wait for a lost one; an elastic run needs kind = {kinds}',
            (("exchange", "kind"),),
        )
    if compute.group_size > 1:
        return (
            "a group cannot finish its batch without one of its workers; an elastic run needs groups of one worker",
            (("compute", "group_size"),),
        )
    return None
