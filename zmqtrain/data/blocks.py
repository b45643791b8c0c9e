"""Batches of samples as they travel: made of a dataset, taken apart into payloads, put together again, and cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zmqtrain.data.partition import Indices
from zmqtrain.errors import TaskError
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload


@dataclass(frozen=True, slots=True)
class Block:
    """Some samples: which, and their content, whose rows are in that order."""

    ids: Indices
    content: Any


class Contents(Protocol):
    """The contents of blocks of samples: how they are read, packed and unpacked."""

    def read(self, ids: Indices) -> Any:
        """Read samples from the dataset. May be called in any thread."""
        ...

    @property
    def fields(self) -> int:
        """Payloads of a block."""
        ...

    def pack(self, block: Block) -> list[Payload]:
        """What travels. Memory of the content; do not write to it until it has arrived."""
        ...

    def unpack(self, payloads: Sequence[Payload]) -> Any:
        """Rebuild received samples, in memory of their own."""
        ...

    def gather(self, rows: Sequence[tuple[Any, int]]) -> Any:
        """New content of single rows of others: (content, row)."""
        ...


class TensorContents:
    """Stacked tensors: alone, or in tuples, lists and dicts as collating makes them."""

    def __init__(self, collated: Callable[[Indices], Any]) -> None:
        """``collated(ids)``: samples of the dataset as a batch, before any transform."""
        self._collated = collated
        self._like: Any = None

    def read(self, ids: Indices) -> Any:
        content = self._collated(ids)
        for tensor in _tensors(content):
            if tensor.dim() == 0 or tensor.shape[0] != len(ids):
                raise TaskError(
                    f"a batch of {len(ids)} samples holds a tensor of shape {list(tensor.shape)}, which is not stacked by samples, "
                    'so it cannot travel round the ring: use ring = "indices" in [data]'
                )
        self._like = content
        return content

    def pack(self, block: Block) -> list[Payload]:
        return [TensorPayload.of(tensor.contiguous()) for tensor in _tensors(block.content)]

    def unpack(self, payloads: Sequence[Payload]) -> Any:
        tensors = []
        for payload in payloads:
            assert isinstance(payload, TensorPayload)
            tensors.append(payload.tensor.clone())
        return _rebuilt(self._template(), iter(tensors))

    @staticmethod
    def copied(content: Any) -> Any:
        """The same content in memory of its own."""
        return _rebuilt(content, iter([tensor.clone() for tensor in _tensors(content)]))

    def gather(self, rows: Sequence[tuple[Any, int]]) -> Any:
        fields = [torch.stack([list(_tensors(content))[field][row] for content, row in rows]) for field in range(self.fields)]
        return _rebuilt(self._template(), iter(fields))

    @property
    def fields(self) -> int:
        """Tensors of a block."""
        return sum(1 for _ in _tensors(self._template()))

    def _template(self) -> Any:
        if self._like is None:
            self._like = self._collated(np.zeros(1, np.int64))  # of any one sample, only to see how samples are made
        return self._like


class PhantomContents:
    """Blocks of which only the sizes travel."""

    def __init__(self, sample_bytes: int) -> None:
        self._sample_bytes = sample_bytes

    @property
    def fields(self) -> int:
        return 1

    def read(self, ids: Indices) -> Any:
        return None

    def pack(self, block: Block) -> list[Payload]:
        return [PhantomPayload(len(block.ids) * self._sample_bytes, "uint8")]

    def unpack(self, payloads: Sequence[Payload]) -> Any:
        return None

    def gather(self, rows: Sequence[tuple[Any, int]]) -> Any:
        return None


def _tensors(content: Any) -> Iterator[Tensor]:
    """All tensors, in a fixed order. Raises `TaskError` for anything else."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from _tensors(value)
    elif isinstance(content, tuple | list):
        for value in content:
            yield from _tensors(value)
    else:
        raise TaskError(
            f"a batch holds a {type(content).__name__}, and only tensors travel round the ring (in tuples, lists and dicts): use "
            'ring = "indices" in [data], or let the data be tensors'
        )


def _rebuilt(like: Any, tensors: Iterator[Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(like, Tensor):
        return next(tensors)
    if isinstance(like, dict):
        return {key: _rebuilt(value, tensors) for key, value in like.items()}
    return type(like)([_rebuilt(value, tensors) for value in like])
