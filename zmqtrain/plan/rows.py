"""A plan as rows of plain values: `zmqtrain plan --json` prints one row per line, and the tables show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zmqtrain.plan.alternatives import Alternative, Flip, alternatives, flip
from zmqtrain.plan.costs import Paper
from zmqtrain.plan.efficiency import Efficiency, saturation
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.planner import Planned
from zmqtrain.plan.price import PlanPrice
from zmqtrain.plan.problem import Problem
from zmqtrain.plan.rules import pure
from zmqtrain.plan.sweep import Point


def link_row(what: str, problem: Problem, network: str) -> dict[str, Any]:
    """The row with the figures from which the other rows are computed."""
    by = problem.pricing
    return {
        "row": "input",
        "layers": what,
        "weights": sum(stage.weights for stage in problem.layers),
        "pricing": "paper" if isinstance(by, Paper) else "ours",
        "per_host": getattr(by, "per_host", None),
        "network": network,
        "alpha_s": problem.link.alpha_s,
        "bandwidth": 8 / problem.link.byte_s,
        "word_bytes": by.word_bytes,
        "overlap": problem.overlap,
        "flops": problem.flops_per_s,
        "memory": problem.memory_bytes,
    }


def layer_rows(planned: Planned) -> Iterator[dict[str, Any]]:
    """A row for each layer: its placement and costs, the alternatives, and what would change the choice."""
    problem, placed = planned.problem, planned.placed
    for index, layer in enumerate(planned.price.layers):
        among = alternatives(problem, placed, index)
        yield {
            "row": "layer",
            "processes": problem.processes,
            "batch": problem.batch,
            "layer": layer.stage.name,
            "kind": layer.stage.head.kind,
            "weights": layer.stage.weights,
            "activations": layer.stage.numel_out,
            "choice": layer.placed.choice,
            "grid": str(layer.placed.grid),
            **_strips(layer.placed),
            "terms": layer.cost.values(problem.link),
            "compute_s": layer.forward_s + layer.backward_s,
            "memory_bytes": layer.memory.total,
            "alternatives": [_alternative(each, problem) for each in among],
            "excluded": planned.options[index].excluded,
            "flip": _flip(flip(problem, placed, index, among)),
        }


def _alternative(each: Alternative, problem: Problem) -> dict[str, Any]:
    return {
        "choice": each.placed.choice,
        "grid": str(each.placed.grid),
        **_strips(each.placed),
        "seconds": each.seconds,
        "terms": each.cost.values(problem.link),
    }


def _flip(found: Flip | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"to": str(found.runner_up.placed), "batch": found.batch, "bandwidth": found.bandwidth}


def total_rows(planned: Planned, name: str) -> list[dict[str, Any]]:
    """The plan's totals, and those of dividing only the batch or only the model."""
    problem = planned.problem
    rows = [_total(problem, name, planned.price, None)]
    rows += [_total(problem, each.name, each.price, each.obstacle) for each in pure(problem)]
    base = rows[1]["step_s"]
    for row in rows:
        row["gain"] = base / row["step_s"] if row["step_s"] else 1.0
    return rows


def _total(problem: Problem, name: str, price: PlanPrice, obstacle: str | None) -> dict[str, Any]:
    link, total = problem.link, price.cost.total
    return {
        "row": "total",
        "processes": problem.processes,
        "batch": problem.batch,
        "plan": name,
        "obstacle": obstacle,
        "messages": total.messages,
        "bytes": total.nbytes,
        "latency_s": link.latency_s(total),
        "volume_s": link.volume_s(total),
        "communication_s": price.communication_s,
        "exposed_s": price.exposed_s,
        "compute_s": price.compute_s,
        "step_s": price.step_s,
        "step_without_overlap_s": price.without_overlap_s,
        "memory_bytes": price.memory.total,
        "terms": price.cost.values(link),
    }


def sweep_row(point: Point) -> dict[str, Any]:
    """The row of one point of a sweep."""
    price = point.planned.price if point.planned else None
    return {
        "row": "sweep",
        "scaling": point.scaling,
        "processes": point.processes,
        "batch": point.batch,
        "pure_batch_s": point.batch_s,
        "pure_model_s": point.model_s,
        "domain_s": point.domain_s,
        "planned_s": None if price is None else price.step_s,
        "exposed_s": None if price is None else price.exposed_s,
        "compute_s": None if price is None else price.compute_s,
        "plan": point.summary,
    }


def efficiency_rows(variant: str, found: Sequence[Efficiency]) -> Iterator[dict[str, Any]]:
    """Hardware efficiency for each number of groups. Groups that share slots are counted separately, as in a topology file."""
    if not found:
        return
    best, saturates = min(each.seconds for each in found), saturation(found)
    for each in found:
        yield {
            "row": "groups",
            "variant": variant,
            "groups": each.step.under_way,
            "group_size": each.group_size,
            "pipeline": each.step.depth,
            "update_s": each.seconds,
            "penalty": each.seconds / best if best else 1.0,
            "group_step_s": each.group_step_s,
            "compute_s": each.step.compute_s,
            "exposed_s": each.step.exposed_s,
            "wait_s": each.step.wait_s,
            "bottleneck": each.bottleneck,
            "saturation": each.groups == saturates,
            "staleness": each.step.staleness,
            "implicit_momentum": 1 - 1 / (each.step.staleness + 1),
            "stations": {station.name: station.seconds for station in each.step.stations},
        }


def _strips(placed: Placed) -> dict[str, str]:
    """How images are divided, where it is not by their height."""
    return {} if placed.wide == 1 else {"strips": placed.strips_text}
