"""Profiles: what is no profile is refused with the layer's name, and what is one of another model, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.train.device.profile import Profile, shipped

GOOD: dict[str, Any] = {"name": "a", "numel": 8, "forward_s": 0.1, "backward_s": 0.2}


def written(tmp_path: Path, layers: Any, **rest: Any) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"layers": layers, **rest}))
    return path


def test_all_fields_are_read(tmp_path: Path) -> None:
    layers = [
        GOOD | {"dtype": "float64", "flops_forward": 10, "activation_numel": 4},
        {"name": "pool", "numel": 0, "forward_s": 0, "backward_s": 0},
    ]
    optimizer = {"name": "torch.optim:SGD", "groups": [{"lr": 1.0}]}
    profile = Profile.load(
        written(tmp_path, layers, name="n", source="s", update_s=1, samples=9, batch_size=4, evaluate_s=2.5, optimizer=optimizer)
    )
    assert (profile.name, profile.source, profile.update_s, profile.samples, profile.numel) == ("n", "s", 1, 9, 8)
    assert (profile.layers[0].flops_forward, profile.layers[0].activation_numel, profile.layers[1].numel) == (10, 4, 0)
    assert profile.step_s == pytest.approx(0.3)
    assert profile.scaled(6) == 1.5
    assert profile.optimizer.groups == ({"lr": 1.0},)
    assert Profile.load(tmp_path / "profile.json") is profile, "read once"


@pytest.mark.parametrize(
    ("layers", "rest", "reason"),
    [
        ([], {}, "there are no layers"),
        ([GOOD | {"numel": 0}], {}, "no layer has parameters"),
        ([GOOD, GOOD], {}, "two layers are named 'a'"),
        ([GOOD, {"name": "b", "numel": 1, "forward_s": 1}], {}, "layer 'b' lacks the field 'backward_s'"),
        ([GOOD, {"numel": 1}], {}, "layer 2 has no name"),
        ([GOOD, "b"], {}, "layer 2 is 'b'; it must be an object"),
        ([GOOD | {"name": 7}], {}, "layer 1 has the name 7"),
        ([GOOD | {"forward_s": -0.1}], {}, "layer 'a': forward_s is -0.1; it must be finite and at least 0"),
        ([GOOD | {"backward_s": float("nan")}], {}, "layer 'a': backward_s is nan"),
        ([GOOD | {"backward_s": float("inf")}], {}, "layer 'a': backward_s is inf"),
        ([GOOD | {"backward_s": "1 s"}], {}, "layer 'a': backward_s is '1 s'; it must be a number of seconds"),
        ([GOOD | {"numel": -1}], {}, "layer 'a': numel is -1"),
        ([GOOD | {"numel": 1.5}], {}, "layer 'a': numel is 1.5; it must be a whole number"),
        ([GOOD | {"numel": True}], {}, "layer 'a': numel is True"),
        ([GOOD | {"dtype": "float23"}], {}, "layer 'a': unknown element type 'float23'"),
        ([GOOD | {"foward_s": 1}], {}, "layer 'a' has an unknown field 'foward_s'; did you mean 'forward_s'"),
        ([GOOD], {"sorce": "x"}, "the profile has an unknown field 'sorce'; did you mean 'source'"),
        ([GOOD], {"update_s": -1}, "the profile: update_s is -1"),
        ([GOOD], {"samples": "many"}, "the profile: samples is 'many'"),
        ([GOOD], {"optimizer": "SGD"}, "optimizer must be like"),
        ({}, {}, "an object with a list named layers"),
    ],
)
def test_what_is_wrong_is_said(layers: Any, rest: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"profile\.json cannot be used") as raised:
        Profile.load(written(tmp_path, layers, **rest))
    assert reason in str(raised.value)


def test_a_file_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("{")
    with pytest.raises(UsageError, match="not JSON"):
        Profile.load(tmp_path / "profile.json")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    assert Profile.load(written(tmp_path, [GOOD])).numel == 8
    assert Profile.load(written(tmp_path, [GOOD | {"numel": 12345}])).numel == 12345


def test_a_model_is_compared_with_the_profile(tmp_path: Path) -> None:
    profile = Profile.load(
        written(tmp_path, [GOOD, GOOD | {"name": "b"}, GOOD | {"name": "pool", "numel": 0}, GOOD | {"name": "c"}], name="mine")
    )
    profile.check_model({"c": 8, "a": 8, "b": 8, "relu": 0})
    with pytest.raises(UsageError) as raised:
        profile.check_model({"a": 8, "b": 9, "head": 10})
    text = str(raised.value)
    assert "profile mine describes another model" in text
    for difference in (
        "c (8 parameters) is not in the model",
        "the model's head (10 parameters) is not in the profile",
        "b has 9 parameters in the model and 8 in",
    ):
        assert difference in text
    with pytest.raises(UsageError, match="and 189 more"):
        profile.check_model({f"layer{index}": 1 for index in range(198)})


def test_shipped_profiles_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Profile.load("resnet50").numel == 25_557_032
    with pytest.raises(UsageError, match=r"available: alexnet, .*, vgg16\. Did you mean 'resnet50'"):
        Profile.load("resnet-50")
    with pytest.raises(UsageError, match="no profile of this name is shipped") as raised:
        Profile.load("zzz")
    assert all(name in str(raised.value) for name in shipped())
    for path in ("resnet50.json", "./resnet50", Path("resnet50")):
        with pytest.raises(UsageError, match="No such file"):
            Profile.load(path)
