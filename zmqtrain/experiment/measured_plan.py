"""``zmqtrain plan --measure``: the plan's steps in the simulated world, compared with its price.

A trial has no exchange and no loss: it sums the weight gradients of each layer by themselves, and gathers the model's outputs. So
it is compared with the price of just that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Phase, Term
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.traffic import Sent
from zmqtrain.parallel.trial import Trial, Tried
from zmqtrain.plan.counted import counted, predicted, stage_of
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.planner import Planned
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import main_grid
from zmqtrain.plan.setup import hosts_of_group, model_of
from zmqtrain.simulate.divided import simulate_divided
from zmqtrain.topology.links import links_of
from zmqtrain.topology.schema import Topology

#: The first step, with new connections, is left out.
STEPS, WARM = 3, 1


def measured_rows(topology: Topology, planned: Planned, data: str | None) -> list[dict[str, Any]]:
    """A row for all that a layer sends, by term and pass: as priced, as counted on the simulated wire, and how long it was waited
    for. Then one about the step.

    Raises `UsageError` where there is no task or no network, or the model cannot be divided; `TaskError` where its code fails.
    """
    planned, network = _of_trial(planned), links_of(topology)
    problem = planned.problem
    hosts = hosts_of_group(topology, problem.processes, main_grid(planned.placed))
    if any(network.host(host).bandwidth is None for host in hosts):
        raise UsageError('--measure runs the plan on the simulated network: add [network] with bandwidth = "1 Gbit/s" to the file')
    model, inputs = model_of(topology, data)
    trial = Trial(
        Grid(1, problem.processes),
        planned.plan,
        problem.batch,
        flops_per_s=problem.flops_per_s,
        steps=STEPS,
        overlap=problem.overlap > 0,
    )
    tried = simulate_divided(model, inputs, trial, network, hosts=hosts, seed=topology.job.seed)
    return [*_by_layer(planned, tried), _total(planned, tried)]


def _of_trial(planned: Planned) -> Planned:
    """The plan at the price of what a trial sends."""
    problem = planned.problem
    layers = tuple(
        replace(
            stage,
            head=replace(stage.head, loss_numbers=0),
            followers=tuple(replace(each, loss_numbers=0) for each in stage.followers),
        )
        for stage in problem.layers
    )
    pricing = replace(problem.pricing, bucket_bytes=0) if isinstance(problem.pricing, Ours) else problem.pricing
    problem = replace(problem, layers=layers, pricing=pricing)
    return replace(planned, problem=problem, price=price(problem, planned.placed))


def _by_layer(planned: Planned, tried: Sequence[Tried]) -> list[dict[str, Any]]:
    layers = planned.problem.layers
    priced, found = predicted(planned.price), counted(layers, [each.sent for each in tried])
    rows = []
    for index, term, phase in sorted({*priced, *found}, key=lambda key: (key[0], key[2] == "backward", key[1])):
        before, after = (each.get((index, term, phase), Sent()) for each in (priced, found))
        rows.append(
            {
                "row": "measured",
                "layer": layers[index].name,
                "choice": planned.placed[index].choice,
                "grid": str(planned.placed[index].grid),
                "term": term,
                "phase": phase,
                "predicted_messages": before.messages,
                "predicted_bytes": before.nbytes,
                "counted_messages": after.messages,
                "counted_bytes": after.nbytes,
                "waited_s": _waited_s(planned, tried, (index, term, phase)),
            }
        )
    return rows


def _waited_s(planned: Planned, tried: Sequence[Tried], key: tuple[int, Term, Phase]) -> float:
    """How long the process that waited longest has waited for a term of a layer: the median over steps, in seconds."""
    layers = planned.problem.layers
    labels = {label for each in tried for label in each.sent if (stage_of(layers, label), label.term, label.phase) == key}
    names = {f"wait for {label}" for label in labels}
    names |= {f"wait for {label.term} of {label.layer}" for label in labels if label.phase == "forward"}
    return statistics.median(
        max(sum(span.seconds for span in each.spans if span.step == step and span.name in names) for each in tried)
        for step in range(WARM, STEPS)
    )


def _total(planned: Planned, tried: Sequence[Tried]) -> dict[str, Any]:
    by_step = [[each.step_s[step] - each.compute_s for each in tried] for step in range(WARM, STEPS)]
    steps = [max(each.step_s[step] for each in tried) for step in range(WARM, STEPS)]
    return {
        "row": "measured_total",
        "steps": STEPS - WARM,
        "predicted_step_s": planned.price.step_s,
        "measured_step_s": statistics.median(steps),
        "predicted_exposed_s": planned.price.exposed_s,
        "measured_exposed_s": statistics.median(max(each) for each in by_step),
        "predicted_compute_s": planned.price.compute_s,
        "measured_compute_s": max(each.compute_s for each in tried),
    }
