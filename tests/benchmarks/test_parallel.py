"""The benchmark's five plans on simulated hosts: they take what was predicted, and in that order."""

from __future__ import annotations

import pytest
import torch

from benchmarks.parallel import BANDWIDTH, LATENCY_S, PLANS, alexnet, planned
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.trial import Trial
from zmqtrain.plan.layers import stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import Problem, placed_of
from zmqtrain.plan.trace import trace_layers
from zmqtrain.simulate.divided import simulate_divided
from zmqtrain.topology.links import NetworkModel, Way

NETWORK = NetworkModel(bandwidth=BANDWIDTH, way=Way(LATENCY_S))
LINK = Link(LATENCY_S, 8 / BANDWIDTH)


def test_plans_take_what_was_predicted_and_in_that_order() -> None:
    with torch.device("meta"):
        model = alexnet()
        inputs = [torch.empty(2, 3, 224, 224)]
        layers = stages(trace_layers(model, inputs))
    problem = Problem(layers, 64, 4, LINK, Ours())
    found = []
    for name, (images, others) in PLANS.items():
        how = planned(layers, images, others)
        trial = Trial(Grid(4, 1), how, 64, steps=2, overlap=False)
        slowest_s = max(each.step_s[1] for each in simulate_divided(model, inputs, trial, NETWORK))
        predicted_s = price(problem, placed_of(problem, how)).communication_s
        assert slowest_s == pytest.approx(predicted_s, rel=0.15), name
        found.append((predicted_s, slowest_s))
    by_prediction = sorted(range(len(found)), key=lambda index: found[index][0])
    by_measure = sorted(range(len(found)), key=lambda index: found[index][1])
    assert by_prediction == by_measure
