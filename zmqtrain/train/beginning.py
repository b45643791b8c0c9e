"""All workers begin with the same model. The exchange sends what it trains; the rest is taken from the first worker.

That is buffers and parameters that are not trained: frozen ones, and those that the optimizer does not have. Usually workers have
the same, since all build the model with the same seed. Not if it was built while the task's module was imported, or before a
session has begun, or with a generator that has no seed, or if processors compute it differently. So digests are compared, and only
what differs is sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce, broadcast
from zmqtrain.wire.tensor import TensorPayload

#: Bytes, to copy no more than that.
DIGESTED_AT_ONCE = 1 << 26
#: Runs a function where the model may be used.
Compute = Callable[[Callable[[], Any]], Awaitable[Any]]


async def begin_alike(tensors: Mapping[str, Tensor], group: Group, tag: str, compute: Compute) -> None:
    """Copy the first member's tensors to all members of ``group``. All call it, with tensors of the same names and shapes."""
    there = [tensor for tensor in tensors.values() if tensor.numel() and tensor.layout is torch.strided]
    if not there or group.size == 1:
        return
    own = np.array(await compute(lambda: [_digest(tensor) for tensor in there]), np.float64)
    first = own.copy()
    await broadcast(group, TensorPayload.of(first), (tag, "digests"))
    differ = (first != own).astype(np.float64)
    await all_reduce(group, TensorPayload.of(differ), (tag, "differ"))
    for number, (tensor, differs) in enumerate(zip(there, differ.tolist(), strict=True)):
        if differs:
            await copy_from_first(group, tensor, (tag, "copy", number))


async def copy_from_first(group: Group, tensor: Tensor, tag: tuple[Any, ...]) -> None:
    """Overwrite the tensor with that of the group's first member. All members call it."""
    there = tensor.detach()
    flat = there.cpu().contiguous()
    raw = flat.view(-1).view(torch.uint8)
    await broadcast(group, TensorPayload.of(raw), tag)
    if group.rank and (flat.device != there.device or flat.data_ptr() != there.data_ptr()):
        with torch.no_grad():
            there.copy_(flat)


def _digest(tensor: Tensor) -> float:
    found = 0
    for part in tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).split(DIGESTED_AT_ONCE):  # type: ignore[no-untyped-call]
        # A copy: memory that numpy has seen cannot be resized any more, as observers for quantization do with their buffers.
        found = zlib.crc32(part.clone().numpy(), found)
    return float(found)
