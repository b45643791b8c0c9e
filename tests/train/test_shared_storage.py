"""Tensors that share a parameter's memory are refused, as they would not follow it into its bucket; others are left alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from zmqtrain.errors import TaskError
from zmqtrain.train.task import check_model


class With(nn.Linear):
    """A layer with one thing more, which ``make(layer)`` returns."""

    def __init__(self, make: Callable[[nn.Linear], object]) -> None:
        super().__init__(4, 4)
        found = make(self)
        if isinstance(found, Tensor) and not isinstance(found, nn.Parameter):
            self.register_buffer("more", found)
        else:
            self.more = found


SHARED: dict[str, Callable[[nn.Linear], object]] = {
    "a buffer": lambda layer: layer.weight.detach(),
    "a part, transposed": lambda layer: layer.weight.data[1:3].t(),
    "another type": lambda layer: layer.weight.data.view(torch.int32),
    "another parameter": lambda layer: nn.Parameter(layer.weight.data[:2]),
    "a frozen one": lambda layer: nn.Parameter(layer.weight.data, requires_grad=False),
    "a list": lambda layer: [torch.zeros(1), layer.weight.data],
    "a mapping": lambda layer: {"w": layer.weight.data},
    "a list of lists": lambda layer: [[torch.zeros(1)], [layer.weight.detach()]],
    "a list of mappings of tuples": lambda layer: [{"w": (layer.weight.detach(),)}],
    "an object": lambda layer: SimpleNamespace(cache=[layer.weight.detach()]),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_shares_a_trained_parameters_memory_is_refused(name: str) -> None:
    with pytest.raises(TaskError, match=r"0\.\w+\S* of the model Sequential shares its memory with the parameter '0\.\w+'.*clone"):
        check_model(nn.Sequential(With(SHARED[name])))


def test_a_plain_attribute_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.__dict__["table"] = model.weight.data
    with pytest.raises(TaskError, match="'table' of the model Linear shares its memory"):
        check_model(model)


def columns() -> nn.Module:
    both, model = torch.randn(4, 6), nn.Module()
    model.left, model.right = nn.Parameter(both[:, :2]), nn.Parameter(both[:, 2:])
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model.kept = [model[0].weight]  # type: ignore[assignment]
    return model


ALONE: dict[str, Callable[[], nn.Module]] = {
    "a copy": lambda: With(lambda layer: layer.weight.detach().clone()),
    "columns of one tensor": columns,
    "tied weights": tied,
    "frozen ones only": lambda: nn.Sequential(
        With(lambda layer: layer.requires_grad_(False) and layer.weight.detach()), nn.Linear(4, 4)
    ),
    "an LSTM": lambda: nn.LSTM(3, 2),
    "spectral_norm, old": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_has_memory_of_its_own_is_left_alone(name: str) -> None:
    check_model(ALONE[name]())


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_an_element_in_several_places_is_refused(what: str) -> None:
    expanded = torch.ones(1, 3).expand(4, 3)
    model = With(lambda _: nn.Parameter(expanded) if what == "parameter" else expanded)
    with pytest.raises(TaskError, match=rf"the {what} 'more' of the model With has the same element in several places.*contiguous"):
        check_model(model)
    check_model(With(lambda _: torch.ones(3).expand(1, 3)))
