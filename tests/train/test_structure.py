"""Targets are taken apart to travel, and put together again."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import torch

from zmqtrain.errors import ProtocolError, TaskError
from zmqtrain.train.structure import put_together, stacked, take_apart

ONE, TWO, THREE = torch.ones(2), torch.zeros(2, 3), torch.arange(2)


@pytest.mark.parametrize("target", [ONE, (ONE, TWO), [ONE, (TWO, {"a": THREE})], {"a": [], "b": {"c": ONE}}, ()])
def test_there_and_back(target: Any) -> None:
    structure, tensors = take_apart(target)
    # In lists, the same tensors are equal.
    assert [put_together(msgpack.unpackb(msgpack.packb(structure)), tensors)] == [target]


@pytest.mark.parametrize(("target", "said"), [("a", "a str"), (None, "a NoneType"), ([ONE, 3], "an int"), ({1: ONE}, "a dict")])
def test_what_cannot_travel_is_said(target: Any, said: str) -> None:
    with pytest.raises(TaskError, match=f"contains {said}"):
        take_apart(target)


@pytest.mark.parametrize("structure", [1, -1, "a", None, ["set", 0], ["tuple", 5], {"a": 2}])
def test_other_descriptions_are_refused(structure: Any) -> None:
    with pytest.raises(ProtocolError, match="is described as"):
        put_together(structure, [ONE])


def test_workers_parts_are_stacked_in_their_order() -> None:
    first, second = stacked([[ONE, TWO], [THREE.float(), TWO + 1]])
    assert first.tolist() == [1, 1, 0, 1]
    assert second.shape == (4, 3)
    (alone,) = stacked([[ONE]])
    assert alone is ONE
    with pytest.raises(ProtocolError, match="different shapes or types"):
        stacked([[ONE], [TWO]])
    with pytest.raises(ProtocolError, match="different numbers of tensors"):
        stacked([[ONE], [ONE, TWO]])
