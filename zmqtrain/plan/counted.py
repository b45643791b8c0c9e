"""What was sent, as the planner sees it: by layer, term and pass, of the rank that sends most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from zmqtrain.parallel.communicator import Label, Phase, Term
from zmqtrain.parallel.model.traffic import Sent
from zmqtrain.plan.layers import Stage
from zmqtrain.plan.price import PlanPrice

#: By the layer's place in the plan.
Counts: TypeAlias = dict[tuple[int, Term, Phase], Sent]


def counted(layers: Sequence[Stage], ranks: Sequence[Mapping[Label, Sent]]) -> Counts:
    """The most messages, and the most bytes, that a rank has sent in a step.

    What is brought together for a layer without weights, as strips before they are flattened, counts with the layer behind it.
    Where the last layers lie on another grid the output goes to the columns that were given its samples; that is no layer's, and
    does not count.
    """
    stage_of = {layer.name: index for index, stage in enumerate(layers) for layer in stage.layers}
    heads = {stage.name for stage in layers}
    sums: dict[tuple[int, Term, Phase], list[Sent]] = defaultdict(lambda: [Sent()] * len(ranks))
    for rank, sent in enumerate(ranks):
        last = 0  # functions have no place of their own
        for label, each in sent.items():
            name = label.layer
            while name and name not in stage_of:
                name = name.rpartition(".")[0]  # a part of a layer
            if label.layer == "output":
                continue
            index = last = stage_of.get(name, last)
            if label.term == "redistribute" and name not in heads:
                index = min(index + 1, len(layers) - 1)
            sums[index, label.term, label.phase][rank] += each
    return {key: Sent(max(each.messages for each in found), max(each.nbytes for each in found)) for key, found in sums.items()}


def predicted(price: PlanPrice) -> Counts:
    """The same, as the plan is priced."""
    found: Counts = {}
    for index, layer in enumerate(price.layers):
        for (term, phase), cost in layer.cost.phases().items():
            if cost.messages or cost.nbytes:
                found[index, term, phase] = Sent(round(cost.messages), round(cost.nbytes))
    return found
