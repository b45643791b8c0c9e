"""What modules keep in attributes is found wherever Python code may have put it, by name, and can be replaced there."""

from __future__ import annotations

import logging
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from zmqtrain.parallel.kept import kept_by, links_of
from zmqtrain.train.linear import write_gradients_to


@dataclass
class Cache:
    """Someone's state."""

    keys: Any
    step: int = 0


@dataclass(frozen=True, slots=True)
class Fixed:
    """It cannot be assigned to."""

    keys: Any


class Pair(NamedTuple):
    """Two things."""

    one: Any
    other: Any


class Helper:
    """An object of the user's own."""

    def __init__(self, table: Any) -> None:
        self.table, self.owner = table, self

    def product(self, x: Tensor) -> Tensor:
        return x * self.table  # type: ignore[no-any-return]


def with_default(tensor: Tensor) -> Callable[..., Tensor]:
    """A function that has a tensor."""

    def product(x: Tensor, weight: Tensor = tensor) -> Tensor:
        return x * weight

    return product


def hidden(weight: Tensor) -> list[nn.Module]:
    """A module that its owner does not register."""
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = weight  # type: ignore[assignment]
    return [layer]


#: How a tensor is kept in ``more``, and the name by which it is found.
PLACES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "an attribute": (lambda tensor: SimpleNamespace(table=tensor), "more.table"),
    "a list": (lambda tensor: [0, tensor], "more[1]"),
    "a list of lists": (lambda tensor: [[], [tensor]], "more[1][0]"),
    "a tuple": (lambda tensor: (tensor, 1), "more[0]"),
    "a tuple in a tuple in a list": (lambda tensor: [("a", (tensor,))], "more[0][1][0]"),
    "a list in a tuple": (lambda tensor: ([tensor],), "more[0][0]"),
    "a set": (lambda tensor: {tensor}, "more[0]"),
    "a queue": (lambda tensor: deque([tensor], maxlen=2), "more[0]"),
    "a named tuple": (lambda tensor: Pair(None, tensor), "more[1]"),
    "a dictionary of lists": (lambda tensor: {"layer": [{3: tensor}]}, "more['layer'][0][3]"),
    "an ordered one": (lambda tensor: OrderedDict(a=tensor), "more['a']"),
    "a dataclass": (lambda tensor: Cache([tensor]), "more.keys[0]"),
    "a frozen one": (lambda tensor: [Fixed(tensor)], "more[0].keys"),
    "a helper that knows itself": (lambda tensor: Helper({"a": tensor}), "more.table['a']"),
    "an argument that a function is given": (lambda tensor: partial(torch.mul, tensor), "more.args[0]"),
    "one by name": (lambda tensor: partial(torch.mul, other=[tensor]), "more.keywords['other'][0]"),
    "a method of a helper": (lambda tensor: Helper(tensor).product, "more.__self__.table"),
    "a default": (with_default, "more.__defaults__[0]"),
    "a variable of the function around": (lambda tensor: [lambda x: x * tensor], "more[0].<tensor>"),
    "a module that is not registered": (hidden, "more[0]._parameters['weight']"),
}


def model_with(make: Callable[[Tensor], Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    vars(model[0])["more"] = make(model[0].weight)
    return model


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found_by_name(place: str) -> None:
    make, name = PLACES[place]
    model = model_with(make)
    (found,) = kept_by(model)
    assert found.name == f"0.{name}"
    assert found.tensor is model[0].weight
    assert [each.name for each in links_of(model)] == [found.name]


@pytest.mark.parametrize("place", PLACES)
def test_it_can_be_replaced_and_put_back(place: str) -> None:
    model, other = model_with(PLACES[place][0]), torch.zeros(3)
    weight = model[0].weight
    (found,) = links_of(model)
    found.replace({id(weight): other if place != "a module that is not registered" else nn.Parameter(other)})
    (now,) = kept_by(model)
    assert now.tensor.shape == (3,)
    found.replace({id(now.tensor): weight})
    (again,) = kept_by(model)
    assert again.tensor is weight


def test_several_in_one_tuple_are_replaced_one_by_one() -> None:
    model = nn.Linear(2, 2)
    vars(model)["more"] = Pair(model.weight, (model.bias, 1))
    others = {id(model.weight): torch.zeros(1), id(model.bias): torch.zeros(2)}
    for link in links_of(model):
        link.replace(others)
    assert [each.tensor.shape[0] for each in kept_by(model)] == [1, 2]
    assert isinstance(vars(model)["more"], Pair)


def test_what_is_gone_is_not_put_back() -> None:
    model = nn.Linear(2, 2)
    vars(model)["more"] = [{"a": model.weight}]
    (link,) = links_of(model)
    vars(model)["more"][0].clear()
    link.replace({id(model.weight): torch.zeros(1)})
    assert vars(model)["more"] == [{}]


def test_where_the_gradient_of_a_weight_goes_is_no_place_where_the_model_keeps_it() -> None:
    model = nn.Linear(2, 2)
    write_gradients_to(model, lambda: None)
    assert list(kept_by(model)) == []


def test_torchs_own_places_and_what_leads_everywhere_are_left_alone() -> None:
    model = nn.Sequential(nn.LSTM(2, 3), nn.utils.spectral_norm(nn.Linear(3, 3)))
    vars(model)["more"] = [model[0], model, logging.getLogger(), nn.Linear, torch.Generator(), UserDict, len, "abc"]
    assert list(kept_by(model)) == []
