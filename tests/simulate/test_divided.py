"""Divided models on simulated hosts: overlap is real, plans cost what was predicted, and the same run is the same again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.parallel.trial import Trial, Tried
from zmqtrain.plan.layers import stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.planner import plan
from zmqtrain.plan.problem import Problem, plan_of
from zmqtrain.plan.rules import pure
from zmqtrain.plan.trace import trace_layers
from zmqtrain.simulate.divided import simulate_divided
from zmqtrain.topology.links import NetworkModel, Way

NETWORK = NetworkModel(bandwidth=1e9, way=Way(200e-6))
LINK = Link(200e-6, 8e-9)
FLOPS = 0.5e12


def block(channels: int = 128) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def tried(model: nn.Module, shape: tuple[int, ...], trial: Trial) -> list[Tried]:
    return simulate_divided(model, [torch.empty(2, *shape)], trial, NETWORK)


def strips(hosts: int, **settings: object) -> Trial:
    grid = Grid(hosts, 1)
    how = Plan(tuple(LayerPlan(name, "domain", grid) for name in "024"))
    return Trial(grid, how, 16, FLOPS, steps=2, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", [2, 4])
def test_halos_travel_while_the_interior_is_computed(hosts: int) -> None:
    overlapped, waiting = (tried(block(), (128, 56, 56), strips(hosts, overlap=overlap)) for overlap in (True, False))
    for rank in range(hosts):
        travelled_s = waiting[rank].travelled_s("halo", 1)
        assert travelled_s > 5e-3
        assert waiting[rank].waited_s("halo", 1) == pytest.approx(travelled_s)
        # Not nothing: in backward they share the link with sums of gradients.
        assert overlapped[rank].waited_s("halo", 1) <= 0.11 * overlapped[rank].travelled_s("halo", 1)
        assert overlapped[rank].step_s[1] < waiting[rank].step_s[1] - 0.9 * travelled_s
        assert not overlapped[rank].late_interiors()
        spans = {span.name for span in overlapped[rank].spans if span.step == 1}
        for layer in "024":
            assert {f"interior of {layer}", f"halo of {layer} (forward)"} <= spans
        assert {"interior of 2 (backward)", "halo of 2 (backward)", "interior of 4 (backward)"} <= spans
    for rank, each in enumerate(waiting):
        expected = {"0", "2", "4", "2 (backward)", "4 (backward)"}
        assert set(each.late_interiors()) == expected, f"rank {rank}: without overlap every interior is late"


def test_the_same_run_is_the_same_again() -> None:
    one, other = (tried(block(8), (8, 16, 16), strips(3, bytes_per_s=1e9)) for _ in range(2))
    assert [each.step_s for each in one] == [each.step_s for each in other]
    assert [each.spans for each in one] == [each.spans for each in other]
    assert [each.sent for each in one] == [each.sent for each in other]


def test_large_linear_layers_are_faster_as_planned_than_pure_batch() -> None:
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 500))
    layers = stages(trace_layers(model, [torch.empty(2, 1024)]))
    problem = Problem(layers, 256, 4, LINK, Ours(), overlap=1.0, flops_per_s=0.05e12)
    best, batch = plan(problem), pure(problem)[0]
    assert any(how.choice == "model" for how in best.placed)
    trial = Trial(Grid(4, 1), best.plan, 256, problem.flops_per_s, steps=2)
    steps = [
        max(each.step_s[1] for each in tried(model, (1024,), replace(trial, plan=how)))
        for how in (best.plan, plan_of(problem, batch.placed))
    ]
    assert steps[0] == pytest.approx(best.price.step_s, rel=0.15)
    assert steps[1] == pytest.approx(batch.price.step_s, rel=0.15)
    assert steps[1] > 1.5 * steps[0]


def test_sums_of_gradients_travel_during_the_backward() -> None:
    """As priced: what is left is the first layer's, and what the network cannot carry meanwhile."""
    layers = stages(trace_layers(block(), [torch.empty(2, 128, 56, 56)]))
    problem = Problem(layers, 16, 2, LINK, Ours(), overlap=1.0, flops_per_s=FLOPS)
    batch = pure(problem)[0]
    trial = Trial(Grid(2, 1), plan_of(problem, batch.placed), 16, FLOPS, steps=2)
    step_s = max(each.step_s[1] for each in tried(block(), (128, 56, 56), trial))
    assert step_s == pytest.approx(batch.price.step_s, rel=0.02)
    assert batch.price.exposed_s < 0.4 * batch.price.communication_s
