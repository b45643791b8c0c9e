"""What was sent, in the planner's terms: by layer, term and pass, for the rank that sends most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from zmqtrain.parallel.communicator import Label, Phase, Term
from zmqtrain.parallel.model.traffic import Sent
from zmqtrain.plan.graph import graph_of
from zmqtrain.plan.layers import Stage
from zmqtrain.plan.price import PlanPrice

#: Counts by the layer's place in the plan.
Counts: TypeAlias = dict[tuple[int, Term, Phase], Sent]


def counted(layers: Sequence[Stage], ranks: Sequence[Mapping[Label, Sent]]) -> Counts:
    """The most messages, and the most bytes, that a rank has sent in a step.

    Data gathered for a layer without weights, like strips before they are flattened, is counted with the layer before it; what
    returns the output to the columns that were given its samples, with the last layer.
    """
    sums: dict[tuple[int, Term, Phase], list[Sent]] = defaultdict(lambda: [Sent()] * len(ranks))
    for rank, sent in enumerate(ranks):
        for label, each in sent.items():
            index = stage_of(layers, label)
            if index is not None:
                sums[index, label.term, label.phase][rank] += each
    return {key: Sent(max(each.messages for each in found), max(each.nbytes for each in found)) for key, found in sums.items()}


def stage_of(layers: Sequence[Stage], label: Label) -> int | None:
    """The place of the layer with which a message is counted; ``None`` for what the planner does not see: functions."""
    graph = graph_of(layers)
    if label.layer == "output" and label.term == "redistribute":
        return graph.output
    if label.term == "redistribute" and label.layer in dict(graph.modules):  # where branches meet
        return dict(graph.modules)[label.layer]
    found = next((index for index, stage in enumerate(layers) if any(each.name == label.layer for each in stage.layers)), None)
    if found is None:  # a part of a layer, such as a transformer's
        return next((index for index, stage in enumerate(layers) if label.layer.startswith(f"{stage.name}.")), None)
    if label.term == "redistribute" and label.layer != layers[found].name:
        return next(iter(graph.after(found)), found)
    return found


def predicted(price: PlanPrice) -> Counts:
    """The same counts, as the plan's price predicts them."""
    found: Counts = {}
    for index, layer in enumerate(price.layers):
        for (term, phase), cost in layer.cost.phases().items():
            if cost.messages or cost.nbytes:
                found[index, term, phase] = Sent(round(cost.messages), round(cost.nbytes))
    return found
