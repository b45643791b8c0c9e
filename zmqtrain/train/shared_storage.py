"""Models whose tensors share memory in a way that is lost when parameters move into buckets.

A replica gives each parameter another place in memory (`zmqtrain.train.replica`). A tensor that shows the same memory, such as a
buffer made by ``weight.detach()``, would stay behind with the first values, while in one process it follows the parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from zmqtrain.errors import TaskError
from zmqtrain.parallel.deferred import twin_of
from zmqtrain.parallel.kept import kept_by


def check_storage(model: nn.Module) -> None:
    """Raise `TaskError` for a tensor that shows a trained parameter's memory, or the same element several times."""
    trained = defaultdict(list)
    for name, parameter in model.named_parameters():
        _require_own_elements(model, "parameter", name, parameter)
        if parameter.requires_grad and parameter.numel():
            trained[storage_of(parameter)].append((name, parameter))
    for name, buffer in model.named_buffers():
        _require_own_elements(model, "buffer", name, buffer)
    for name, tensor in _tensors(model):
        for of, parameter in trained.get(storage_of(tensor), ()):
            if tensor is not parameter and _overlap(tensor, parameter):
                raise TaskError(
                    f"{name!r} of the model {type(model).__name__} shares its memory with the parameter {of!r}, which gets a place "
                    f"of its own, so {name!r} would keep the first values: let the forward use the parameter itself (under "
                    "torch.no_grad() or with .detach(), if it needs no gradient there), or clone() it if the first values are meant"
                )


def _require_own_elements(model: nn.Module, what: str, name: str, tensor: Tensor) -> None:
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise TaskError(
            f"the {what} {name!r} of the model {type(model).__name__} has the same element in several places, as expand() makes "
            "it, so nothing can be written to it, also when model.safetensors is loaded: keep it as it was before expand(), and "
            "expand it in the forward; or call contiguous()"
        )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and what else modules keep, by their names."""
    for prefix, module in model.named_modules():
        before = f"{prefix}." if prefix else ""
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                yield before + key, value
    yield from ((kept.name, kept.tensor) for kept in kept_by(model) if kept.tensor.layout is torch.strided)


def storage_of(tensor: Tensor) -> int:
    """What is the same for tensors that are in the same memory."""
    return int(twin_of(tensor).untyped_storage()._cdata)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common. Those of different types are taken to have one."""
    if one.dtype != other.dtype:
        return True
    if not one.numel():
        return False
    numel = twin_of(one).untyped_storage().nbytes() // one.element_size()
    used = torch.zeros(numel, dtype=torch.bool)
    used.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(used.as_strided(other.shape, other.stride(), other.storage_offset()).any())
