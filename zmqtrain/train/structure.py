"""Targets as tensors and a plain description of their structure, so that they can be sent and reassembled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zmqtrain.errors import ProtocolError, TaskError
from zmqtrain.wire.payload import Value
from zmqtrain.words import typed


def take_apart(target: Any) -> tuple[Value, list[Tensor]]:
    """Returns a description of the target's structure, and its tensors. Raises `TaskError` if it contains anything else.

    In the description a number is the index of a tensor; ``["tuple", ...]``, ``["list", ...]`` and ``{...}`` are containers.
    """
    tensors: list[Tensor] = []

    def walk(value: Any) -> Value:
        if isinstance(value, Tensor):
            tensors.append(value)
            return len(tensors) - 1
        if isinstance(value, tuple | list):
            return ["tuple" if isinstance(value, tuple) else "list", *(walk(each) for each in value)]
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: walk(each) for key, each in value.items()}
        raise TaskError(
            f"a target of the task's data contains {typed(value)}; with merged_fc targets are sent to the FC server, so "
            "they must be tensors, or tuples, lists and dicts of tensors"
        )

    return walk(target), tensors


def put_together(structure: Value, tensors: Sequence[Tensor]) -> Any:
    """Rebuild the target that `take_apart` was given from these tensors. Raises `ProtocolError` if they do not match."""

    def walk(value: Value) -> Any:
        match value:
            case int(place) if 0 <= place < len(tensors):
                return tensors[place]
            case ["tuple", *items]:
                return tuple(walk(each) for each in items)
            case ["list", *items]:
                return [walk(each) for each in items]
            case dict():
                return {key: walk(each) for key, each in value.items()}
        raise ProtocolError(f"a target of {len(tensors)} tensors is described as {value!r:.100}")

    return walk(structure)


def stacked(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Concatenate several workers' tensors, place by place, along the samples. Those of a single worker are returned unchanged.

    Raises `ProtocolError` if they do not fit each other.
    """
    if len({len(part) for part in parts}) != 1:
        raise ProtocolError("the workers of a group sent different numbers of tensors; they must have the same model and task")
    found = []
    for tensors in zip(*parts, strict=True):
        if len({(each.dtype, each.shape[1:]) for each in tensors}) != 1:
            shapes = ", ".join(f"{each.dtype}{list(each.shape)}" for each in tensors)
            raise ProtocolError(
                f"the workers of a group sent tensors of different shapes or types ({shapes}): pad them to one size"
            )
        found.append(tensors[0] if len(tensors) == 1 else torch.cat(tensors))
    return found
