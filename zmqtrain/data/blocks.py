"""Batches of samples that are sent between workers: read from a dataset, converted to and from payloads, and divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zmqtrain.data.draws import drawn_from
from zmqtrain.data.partition import Indices
from zmqtrain.errors import TaskError
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.words import typed


@dataclass(frozen=True, slots=True)
class Block:
    """Some samples: their indices and their content, in the same order."""

    ids: Indices
    content: Any


class Contents(Protocol):
    """How the contents of blocks of samples are read, packed and unpacked."""

    def read(self, ids: Indices, seed: Sequence[int] | None = None) -> Any:
        """Read the samples with these indices from the dataset. May be called in any thread. ``seed``: of what the dataset draws
        from global generators."""
        ...

    @property
    def fields(self) -> int:
        """The number of payloads of a block."""
        ...

    def pack(self, block: Block) -> list[Payload]:
        """The payloads to send. They alias the block's content: do not write to it until they have arrived."""
        ...

    def unpack(self, payloads: Sequence[Payload]) -> Any:
        """The content of received payloads, in memory of its own."""
        ...

    def gather(self, rows: Sequence[tuple[Any, int]]) -> Any:
        """Make new content from rows of others, given as pairs (content, row)."""
        ...


class TensorContents:
    """Stacked tensors: alone, or in tuples, lists and dicts as collating makes them. Their first dimension counts samples."""

    def __init__(self, collated: Callable[[Indices], Any]) -> None:
        """``collated(ids)`` returns samples of the dataset as a batch, before any transform."""
        self._collated = collated
        self._like: Any = None

    def read(self, ids: Indices, seed: Sequence[int] | None = None) -> Any:
        with nullcontext() if seed is None else drawn_from(seed):
            content = self._collated(ids)
        for tensor in _tensors(content):
            if tensor.dim() == 0 or tensor.shape[0] != len(ids):
                raise TaskError(
                    f"a batch of {len(ids)} samples holds a tensor of shape {list(tensor.shape)}, whose first dimension does not "
                    "count "
                    'samples, so it cannot be sent around the ring: set [data] ring = "indices"'
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
        """The number of tensors of a block."""
        return sum(1 for _ in _tensors(self._template()))

    def _template(self) -> Any:
        if self._like is None:
            self._like = self._collated(np.zeros(1, np.int64))  # any one sample shows the structure
        return self._like


class PhantomContents:
    """Blocks of which only the sizes are sent."""

    def __init__(self, sample_bytes: int) -> None:
        self._sample_bytes = sample_bytes

    @property
    def fields(self) -> int:
        return 1

    def read(self, ids: Indices, seed: Sequence[int] | None = None) -> Any:
        return None

    def pack(self, block: Block) -> list[Payload]:
        return [PhantomPayload(len(block.ids) * self._sample_bytes, "uint8")]

    def unpack(self, payloads: Sequence[Payload]) -> Any:
        return None

    def gather(self, rows: Sequence[tuple[Any, int]]) -> Any:
        return None


def _tensors(content: Any) -> Iterator[Tensor]:
    """All tensors, in a fixed order. Raises `TaskError` if there is anything else."""
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
            f"a batch holds {typed(content)}, but only tensors (in tuples, lists and dicts) can be sent around the ring: "
            "set "
            '[data] ring = "indices", or convert the data to tensors'
        )


def _rebuilt(like: Any, tensors: Iterator[Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(like, Tensor):
        return next(tensors)
    if isinstance(like, dict):
        return {key: _rebuilt(value, tensors) for key, value in like.items()}
    return type(like)([_rebuilt(value, tensors) for value in like])
