"""Layers of modules and of profiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.plan.networks import LINK
from zmqtrain.errors import UsageError
from zmqtrain.plan.layers import stages
from zmqtrain.plan.planner import plan
from zmqtrain.plan.problem import Problem
from zmqtrain.plan.profiled import profile_layers, with_times
from zmqtrain.plan.shipped import Alexnet
from zmqtrain.plan.trace import trace_layers
from zmqtrain.train.device.profile import Layer, Profile, shipped


def alexnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 96, 11, 4, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(96, 256, 5, padding=2, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(256, 384, 3, padding=1, bias=False), nn.ReLU(),
        nn.Conv2d(384, 384, 3, padding=1, bias=False), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Linear(9216, 4096, bias=False), nn.ReLU(),
        nn.Linear(4096, 4096, bias=False), nn.ReLU(),
        nn.Linear(4096, 1000, bias=False),
    )  # fmt: skip


def test_alexnet_traced_is_the_shipped_table() -> None:
    with torch.device("meta"):
        model = alexnet()
    traced = stages(trace_layers(model, (torch.empty(2, 3, 227, 227, device="meta"),)))
    table = stages(Alexnet().layers())
    names = {id(module): name for name, module in model.named_modules()}
    assert [stage.name for stage in traced] == [names[id(m)] for m in model if isinstance(m, nn.Conv2d | nn.Linear)]
    for found, expected in zip(traced, table, strict=True):
        assert (found.weights, found.numel_in, found.numel_out) == (expected.weights, expected.numel_in, expected.numel_out)
        for name in ("kind", "inputs", "outputs", "kernel", "stride", "padding", "flops"):
            assert getattr(found.head, name) == getattr(expected.head, name), name


class Odd(nn.Module):
    """A parameter of its own, a layer that is called twice, several inputs, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.twice = nn.Linear(6, 6)
        self.rnn = nn.LSTM(6, 5, num_layers=2)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.unused = nn.Linear(3, 3)

    def forward(self, words: Tensor, more: dict[str, Tensor]) -> Tensor:
        hidden = self.words(words) * self.scale + more["bias"]
        hidden = self.twice(self.twice(hidden)) + hidden
        states, _ = self.rnn(hidden.transpose(0, 1))
        states = states.transpose(0, 1)
        return self.attention(states, states, states)[0]


def test_sequences_calls_and_parameters_of_containers() -> None:
    model = Odd()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    inputs: tuple[Any, ...] = (torch.zeros(4, 7, dtype=torch.long), {"bias": torch.zeros(4, 7, 6)})
    found = {layer.name: layer for layer in trace_layers(model, inputs)}
    assert list(found) == ["words", "twice", "rnn", "attention", ""]
    assert (found["words"].kind, found["words"].outputs, found["words"].weights) == ("embedding", (7, 6), 60)
    assert (found["twice"].calls, found["twice"].flops, found["twice"].units) == (2, 2 * 36 * 7, 6)
    rnn = found["rnn"]
    assert (rnn.kind, rnn.inputs, rnn.outputs, rnn.rounds) == ("recurrent", (7, 6), (7, 5), 14)
    assert found["attention"].weights == sum(parameter.numel() for parameter in model.attention.parameters())
    assert (found[""].kind, found[""].weights) == ("own", 6)
    assert [stage.name for stage in stages(list(found.values()))] == ["words", "twice", "rnn", "attention"]
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


class NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) if x.sum().item() >= 0 else x


def test_a_model_that_needs_values_runs_for_real() -> None:
    model = NeedsValues().eval()
    assert [layer.name for layer in trace_layers(model, (torch.zeros(9, 4),))] == ["layer", "norm"]
    assert not model.training


def test_models_that_cannot_be_planned_for() -> None:
    with pytest.raises(UsageError, match=r"forward of Linear raised RuntimeError"):
        trace_layers(nn.Linear(3, 3), (torch.zeros(2, 4),))
    with pytest.raises(UsageError, match=r"forward of ReLU calls no layer with weights"):
        trace_layers(nn.ReLU(), (torch.zeros(2, 4),))


@pytest.mark.parametrize("name", shipped())
def test_shipped_profiles_can_be_planned_for(name: str) -> None:
    profile = Profile.load(name)
    layers = stages(profile_layers(profile, 32))
    assert sum(stage.weights for stage in layers) == profile.numel
    assert sum(sum(stage.seconds(0)) for stage in layers) * (profile.batch_size or 32) == pytest.approx(profile.step_s, rel=0.01)
    assert len(plan(Problem(layers, 64, 4, LINK)).placed) == len(layers)


def test_outputs_of_a_profile_s_layers_follow_from_its_figures() -> None:
    found = {stage.name: stage for stage in stages(profile_layers(Profile.load("alexnet"), 256))}
    assert {name: stage.head.units for name, stage in found.items()} == {
        "conv1": 96, "conv2": 256, "conv3": 384, "conv4": 384, "conv5": 256, "fc6": 4096, "fc7": 4096, "fc8": 1000
    }  # fmt: skip
    assert found["conv1"].numel_out == 27 * 27 * 96
    obstacle = Problem(tuple(found.values()), 64, 4, LINK).options(found["conv1"]).excluded["domain"]
    assert obstacle == "its input is not an image"
    odd = Profile((Layer("a", 7, 1.0, 1.0, flops_forward=1001, activation_numel=5),))
    assert stages(profile_layers(odd, 1))[0].head.kind == "other"


def test_a_profile_s_times_for_a_traced_model() -> None:
    layers = trace_layers(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.zeros(2, 4),))
    timed = with_times(layers, Profile((Layer("0", 40, 0.5, 1.0), Layer("1", 0, 0.1, 0.2)), batch_size=10), 7)
    assert stages(timed)[0].seconds(0) == pytest.approx((0.06, 0.12))
    with pytest.raises(UsageError, match=r"describes another model than the task's"):
        with_times(layers, Profile((Layer("0", 41, 0.5, 1.0),)), 7)


def test_what_divided_layers_need_to_know() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2, enable_nested_tensor=False)
    layers = trace_layers(nn.Sequential(encoder, nn.LayerNorm(8), nn.Linear(8, 6)), (torch.zeros(2, 5, 8),))
    found = {layer.name: layer for layer in layers}
    assert list(found) == ["0", "1", "2"]  # the encoder is divided as one
    first = found["0"]
    assert (first.kind, first.units, first.sums, len(first.pieces)) == ("encoder", 2, 4, 12)
    assert sum(part.units * part.each + part.whole for part in first.pieces) == first.weights
    assert [layer.mixes for layer in layers] == [False, True, False]
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.LocalResponseNorm(3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    layers = trace_layers(model, (torch.zeros(2, 4, 9, 9),))
    assert [layer.mixes for layer in layers] == [False, False, False, True, False, False]
    assert [layer.statistics for layer in layers] == [False, True, False, False, False, False]
    assert (layers[0].groups, layers[4].adaptive, layers[4].one_row) == (2, True, True)
    (stage,) = stages(layers)
    assert (stage.leaves_channels, stage.leaves_strips) == (False, False)
    assert stage.gathered_at is layers[3]
    assert [layers[0].most_units(rows) for rows in (1, 2, 4)] == [8, 4, 2]
