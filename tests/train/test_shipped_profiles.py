"""Shipped profiles: the sizes of the models that they are named for, and times that add up to what was measured."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.shipped_models import MODELS
from zmqtrain.errors import UsageError
from zmqtrain.train.device.profile import SHIPPED, Profile, shipped

SCRIPT = Path(__file__).parents[2] / "docs" / "make_profiles.py"
PARAMETERS = {
    "lenet": 431_080,
    "cifarnet": 145_578,
    "alexnet": 60_965_224,
    "vgg16": 138_357_544,
    "googlenet": 6_998_552,
    "resnet50": 25_557_032,
    "lstm": 4_269_121,
    "transformer": 124_439_808,
}


def test_the_files_are_what_the_script_makes() -> None:
    documents = runpy.run_path(str(SCRIPT))["documents"]()
    assert {file.name: file.read_text() for file in SHIPPED.glob("*.json")} == documents, "run `make docs`"


def test_all_are_there() -> None:
    assert set(shipped()) == set(PARAMETERS) == set(MODELS)


def forward(name: str) -> tuple[dict[str, int], dict[str, int], dict[str, int], list[str]]:
    """Of the torch model: parameters, elements of the output and arithmetic by module; and the order of calls."""
    make, shape = MODELS[name]
    with torch.device("meta"):
        model = make().eval()
        sample = torch.zeros((1, *shape), dtype=torch.long if len(shape) == 1 else torch.float32)
    outputs: dict[str, int] = {}
    flops: dict[str, int] = {}
    order: list[str] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        output = output if isinstance(output, Tensor) else output[0]
        path = paths[module]
        order.append(path)
        outputs[path] = output.numel()
        if isinstance(module, nn.Conv2d):
            flops[path] = 2 * module.weight.numel() * output.shape[2] * output.shape[3]
        elif isinstance(module, nn.Linear):
            flops[path] = 2 * module.weight.numel() * output.numel() // output.shape[-1]

    paths = {module: path for path, module in model.named_modules() if path}
    for module in paths:
        module.register_forward_hook(note)
    model(sample)
    counted: set[int] = set()
    parameters: dict[str, int] = {}
    for path, module in model.named_modules():
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in counted]
        counted.update(id(parameter) for parameter in own)
        if own:
            parameters[path] = sum(parameter.numel() for parameter in own)
    return parameters, outputs, flops, order


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_layer_has_the_size_that_torch_gives_it(name: str) -> None:
    profile = Profile.load(name)
    parameters, outputs, flops, order = forward(name)
    assert profile.name == name
    assert profile.numel == PARAMETERS[name]
    profile.check_model(parameters)
    known = {layer.name: layer for layer in profile.layers}
    for path, numel in outputs.items():
        if path in known:
            assert known[path].activation_numel == numel, path
    for path, count in flops.items():
        assert known[path].flops_forward == count, path
    names = [path for path in order if path in known and known[path].numel]
    assert [layer.name for layer in profile.layers if layer.numel] == names, "in the order of the forward"


def test_another_model_is_not_the_profile_s() -> None:
    parameters, *_ = forward("lenet")
    with pytest.raises(UsageError, match="profile cifarnet describes another model") as raised:
        Profile.load("cifarnet").check_model(parameters)
    assert "conv1 has 520 parameters in the model and 2432 in the profile" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "batch_size", "step_s"), [("resnet50", 32, 0.096), ("googlenet", 128, 0.562841 + 1.12384), ("alexnet", 256, 1.325)]
)
def test_a_step_takes_what_was_measured(name: str, batch_size: int, step_s: float) -> None:
    profile = Profile.load(name)
    assert "Measured: " in profile.source
    assert profile.batch_size == batch_size
    with_update = profile.update_s if name == "alexnet" else 0.0
    assert profile.step_s + with_update == pytest.approx(step_s, rel=1e-4)


@pytest.mark.parametrize("name", PARAMETERS)
def test_times_are_plausible_and_say_where_they_come_from(name: str) -> None:
    profile = Profile.load(name)
    assert ("Measured" in profile.source) != ("nominal" in profile.source)
    forward_s = sum(layer.forward_s for layer in profile.layers)
    assert 0.3 < forward_s / profile.step_s < 0.45, "the backward is about twice the forward"
    assert all(layer.forward_s > 0 and layer.backward_s > 0 and layer.activation_numel > 0 for layer in profile.layers)
    assert profile.update_s > 0
    assert profile.samples >= 1000
