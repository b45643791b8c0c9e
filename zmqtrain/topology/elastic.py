"""Which runs can carry on without workers that are lost. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqtrain.topology.broken_rule import Path

if TYPE_CHECKING:
    from zmqtrain.topology.schema import Topology

#: The exchanges that form their groups anew.
_KINDS = ("gossip", "averaging", "allreduce")


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
    if exchange.kind == "allreduce" and compute.parts != "even":
        return (
            "the parts of a batch do not change when a worker is lost; an elastic run with all-reduce needs even parts",
            (("compute", "parts"),),
        )
    if exchange.kind == "allreduce" and topology.data.shuffle == "ring":
        return (
            'the batches of a ring may differ in size; an elastic run with all-reduce needs shuffle = "global" or "none"',
            (("data", "shuffle"),),
        )
    return None


def elastic_by_default(topology: Topology) -> bool:
    """Whether the run is elastic if its file does not say. Not with all-reduce: workers of one host would not share memory."""
    return topology.exchange.kind != "allreduce" and why_not_elastic(topology) is None
