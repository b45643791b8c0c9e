"""How the model and the loss get a batch, and how it is cut: right, or refused with a reason."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zmqtrain.data.batch import Batch, batch_of
from zmqtrain.data.nested import leaves, mapped, rows
from zmqtrain.errors import TaskError, UsageError

X, Y = torch.arange(14.0).reshape(7, 2), torch.arange(7)


class Named(NamedTuple):
    image: Tensor
    label: Tensor


class LabelFirst(NamedTuple):
    label: Tensor
    image: Tensor


@dataclass
class Detected:
    boxes: Tensor
    names: list[str]


class Called(nn.Module):
    def forward(self, *inputs: Any, **named: Any) -> Any:
        return inputs, named


@pytest.mark.parametrize(
    ("collated", "inputs", "named", "target"),
    [
        ((X, Y), (X,), {}, Y),
        ([X, Y], (X,), {}, Y),
        ((X, X, Y), (X, X), {}, Y),
        (Named(X, Y), (X,), {}, Y),
        (((X, X), Y), ((X, X),), {}, Y),
        ({"x": X, "labels": Y}, (), {"x": X}, Y),
        ({"label": Y, "a": X, "b": X}, (), {"a": X, "b": X}, Y),
        (UserDict(x=X, target=Y), (), {"x": X}, Y),
    ],
)
def test_what_the_model_and_the_loss_get(collated: Any, inputs: Any, named: Any, target: Any) -> None:
    batch = batch_of(collated, 7)
    assert batch.target is target
    assert batch.output(Called()) == (inputs, named)


def test_a_forward_of_one_s_own_gets_everything() -> None:
    batch = batch_of({"x": X, "kind": Y}, 7, lambda model, batch: model(batch["x"]))
    assert batch.output(Called()) == ((X,), {})
    assert set(batch.target) == {"x", "kind"}
    assert batch.split(3)[1].target["kind"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("collated", "said"),
    [
        (X, "is a Tensor; it must be"),
        ([X], "is a list; it must be"),
        (Detected(X, []), "is a Detected; it must be"),
        ({"x": X, "kind": Y}, "has none of labels, label, targets, target"),
        ({"x": X, "label": Y, "target": Y}, "has 'label' and 'target'"),
        ({1: X, "label": Y}, "the key 1, which is not a valid argument name"),
        (LabelFirst(Y, X), "last field, which should be the target, is 'image', although it has 'label'"),
    ],
)
def test_what_is_not_certain_is_refused(collated: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        batch_of(collated, 7)


def test_arguments_by_position_for_those_who_trace() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor, *, scale: float = 1.0) -> Tensor:
            return a + b * scale

    assert batch_of({"b": Y, "a": X, "label": Y}, 7).arguments(Two()) == (X, Y)
    for refused in (batch_of({"a": X, "b": X, "scale": 2.0, "label": Y}, 7), batch_of(X, 7, lambda model, x: model(x, x))):
        with pytest.raises(UsageError, match="known by position"):
            refused.arguments(Two())


@pytest.mark.parametrize(
    ("part", "first_three"),
    [
        (Y, [0, 1, 2]),
        (Y.numpy(), [0, 1, 2]),
        ([f"text {i}" for i in range(7)], ["text 0", "text 1", "text 2"]),
        (tuple(f"text {i}" for i in range(7)), ("text 0", "text 1", "text 2")),
        ([{"boxes": torch.zeros(i, 4)} for i in range(7)], 3),
        ([torch.zeros(i + 1) for i in range(7)], 3),
        ("one text", "one text"),
        (3.5, 3.5),
        (torch.tensor(2.0), 2.0),
    ],
)
def test_rows_of_what_belongs_to_samples(part: Any, first_three: Any) -> None:
    found = rows(part, slice(0, 3), 7)
    if isinstance(first_three, int):
        assert len(found) == first_three
    elif isinstance(found, Tensor | np.ndarray):
        assert found.tolist() == first_three
    else:
        assert found == first_three


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (torch.zeros(5, 2), r"a tensor of shape \[5, 2\]"),
        (np.zeros((8, 2)), r"a numpy array of shape \[8, 2\]"),
        ({"edges": torch.zeros(2, 30)}, r"a tensor of shape \[2, 30\]"),
        ([torch.zeros(7, 2)] * 7, "a list of 7 entries, which may be one per sample, or fields of all samples"),
        (object(), "an object"),
        (torch.nn.utils.rnn.pack_sequence([torch.zeros(2)]), "a PackedSequence"),
    ],
)
def test_what_cannot_be_cut_is_refused(part: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        Batch((part,), Y, 7).split(2)
    assert Batch((part,), Y, 7).split(1)[0].inputs[0] is part


def test_structures_keep_their_types() -> None:
    part = {"a": [X, (Y, "text")], "b": Named(X, Y), "c": Detected(X, ["x"]), "d": UserDict(x=X)}
    doubled = mapped(part, lambda tensor: tensor * 2)
    assert [type(value) for value in doubled.values()] == [list, Named, Detected, UserDict]
    assert torch.equal(doubled["c"].boxes, X * 2)
    assert torch.equal(doubled["d"]["x"], X * 2)
    assert doubled["a"][1][1] == "text"
    assert part["d"]["x"] is X
    assert [leaf for leaf in leaves(part) if isinstance(leaf, str)] == ["text", "x"]


def test_batches_move_to_a_device_in_any_structure() -> None:
    class Own:
        where = "cpu"

        def to(self, device: torch.device) -> Any:
            moved = Own()
            moved.where = device.type
            return moved

    batch = batch_of({"x": Detected(X, ["x"]), "own": Own(), "label": Y}, 7).to(torch.device("meta"))
    assert batch.named["x"].boxes.device.type == batch.target.device.type == "meta"
    assert batch.named["own"].where == "meta"
