"""Values and tensors from one process of a group to another, where the receiver does not know what comes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zmqtrain.parallel.communicator import Expected, Fabric, Label

_LABEL = Label("", "statistics")
#: Where each tensor begins among the bytes of a message: at an address that suits any type.
_ALIGNED = 16


class Line:
    """Between some ranks. Each message is received by the rank that it is for, in the order of sending."""

    def __init__(self, fabric: Fabric, ranks: tuple[int, ...]) -> None:
        self._group, self._ranks = fabric.among(ranks), ranks

    def send(self, to: int, value: Any, tensors: Sequence[Tensor] = ()) -> None:
        """``value``: what JSON can say."""
        strided = [each.to_dense() if each.layout is not torch.strided else each for each in map(Tensor.detach, tensors)]
        about = [(str(each.dtype).removeprefix("torch."), list(each.shape)) for each in strided]
        pieces = [torch.frombuffer(bytearray(json.dumps([value, about]).encode()), dtype=torch.uint8)]
        head = length = pieces[0].numel()
        for each in strided:
            padding = -length % _ALIGNED
            pieces += torch.zeros(padding, dtype=torch.uint8), each.cpu().contiguous().reshape(-1).view(torch.uint8)
            length += padding + each.nbytes
        content = torch.cat(pieces)
        member = self._ranks.index(to)
        sizes = torch.tensor([head, content.numel()])
        self._group.exchange([(member, sizes), (member, content)], [], _LABEL).wait()

    def receive(self, source: int) -> tuple[Any, list[Tensor]]:
        """The next message of a rank: the value, and tensors in the host's memory."""
        member = self._ranks.index(source)
        (sizes,) = self._group.exchange([], [Expected(member, (2,), torch.int64)], _LABEL).wait()
        head, every = (int(each) for each in sizes)
        (content,) = self._group.exchange([], [Expected(member, (every,), torch.uint8)], _LABEL).wait()
        value, about = json.loads(bytes(content[:head].numpy()))
        tensors, start = [], head
        for name, shape in about:
            dtype = getattr(torch, name)
            start += -start % _ALIGNED
            stop = start + dtype.itemsize * int(torch.Size(shape).numel())
            tensors.append(content[start:stop].view(dtype).view(shape))
            start = stop
        return value, tensors
