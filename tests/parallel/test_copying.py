"""A model is copied where its copy is one of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from zmqtrain.parallel.copying import copied, refers_to_itself


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def patched(model: nn.Module) -> None:
    before = model[0].forward
    model[0].forward = lambda x: before(x) * 2


def collecting(model: nn.Module) -> None:
    model.seen = []  # type: ignore[assignment]
    seen = model.seen
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output))  # type: ignore[operator]


def nested(model: nn.Module) -> None:
    def inner() -> nn.Module:
        return model

    model[1].register_forward_pre_hook(lambda module, inputs: inner() and None)


class Helper:
    """An object of the user's own."""

    def __init__(self, model: nn.Module) -> None:
        self.models = [model]


def helped(model: nn.Module) -> None:
    helper = Helper(model)
    model[2].register_forward_hook(lambda *_: helper and None)


#: What is done to a model so that a copy would refer to it.
ITSELF: dict[str, Callable[[nn.Module], object]] = {
    "a forward of another one": patched,
    "a hook with a list of the model": collecting,
    "a hook with the model": lambda model: model[2].register_forward_hook(lambda *_: model and None),
    "a hook with a method": lambda model: model[2].register_forward_hook(lambda *_, method=model.train: method and None),
    "a hook with a weight": lambda model: model[2].register_full_backward_hook(lambda *_, given=(model[0].weight,): None),
    "a function within a function": nested,
    "a function in a list": lambda model: vars(model).update(more=[{"a": lambda x: model[0](x)}]),
    "a function with an object": helped,
    "a partial function": lambda model: model[2].register_forward_hook(partial(lambda *_: model and None, 1)),
}


@pytest.mark.parametrize("name", ITSELF)
def test_functions_that_refer_to_the_model(name: str) -> None:
    model = layers()
    assert not refers_to_itself(model)
    ITSELF[name](model)
    assert refers_to_itself(model)
    assert copied(model) is None


def doubled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.Linear.forward(module, x) * 2  # type: ignore[arg-type]


#: What a copy has for itself.
APART: dict[str, Callable[[nn.Module], object]] = {
    "a hook": lambda model: model[2].register_forward_hook(lambda module, inputs, output: output * 2),
    "a hook with a number": lambda model: model[2].register_forward_hook(lambda *_, factor=2: None),
    "a method": lambda model: setattr(model[0], "forward", MethodType(doubled, model[0])),
    "a partial of the module": lambda model: setattr(model[0], "forward", partial(doubled, model[0])),
    "spectral_norm, old": lambda model: nn.utils.spectral_norm(model[0]),
    "weight_norm": lambda model: parametrizations.weight_norm(model[0]),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_copied(name: str) -> None:
    model, x = layers(), torch.randn(3, 2)
    APART[name](model)
    model.eval()
    other = copied(model)
    assert other is not None
    expected = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(other(x), expected)


def test_what_cannot_be_copied() -> None:
    model = layers()
    model.lock = threading.Lock()  # type: ignore[assignment]
    assert copied(model) is None
