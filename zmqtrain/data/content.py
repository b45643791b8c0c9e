"""What data that is held in memory has in it, in short: workers compare it, since each calls the task's function by itself.

A generator without a seed, or the order of a set of strings, makes other data in every process, with as many samples. Only what
lies in memory is looked at, and of large tensors some elements: no sample is read or opened for it. A sampler says its own order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from zmqtrain.data.nested import PLAIN, leaves
from zmqtrain.data.partition import Indices

#: How many elements of a tensor, and samples of a list, are looked at; a permutation changes nearly all.
MOST_ELEMENTS, MOST_SAMPLES = 4096, 64
#: Of how many attributes of a dataset it is said what they are, and how many datasets lie in each other.
MOST_ATTRIBUTES, MOST_DEPTH = 50, 4


def content_of(data: Any, order: Callable[[int], Indices] | None = None) -> list[str]:
    """A line for each part of the data that is held in memory; empty if nothing is known to be. ``order``: a sampler's, of which
    the first epoch is looked at."""
    lines = list(_lines(data))
    if order is not None:
        first = order(0)
        lines.append(f"a sampler of {len(first)} samples: {_digest(first)}")
    return lines


def attributes_of(data: Any) -> dict[str, list[str]]:
    """What objects of the user's own classes keep, by the names of their attributes (``base.order``): tensors, arrays and lists of
    plain values, which say what ``data[i]`` is. Of paths the last parts, as folders may be others on each machine. Nothing of data
    that `content_of` knows."""
    return dict(islice(_attributes(data, "", MOST_DEPTH), MOST_ATTRIBUTES))


def _attributes(data: Any, where: str, depth: int) -> Iterator[tuple[str, list[str]]]:
    if isinstance(data, Tensor | np.ndarray | TensorDataset) or not hasattr(data, "__dict__"):
        return
    for name, value in sorted(vars(data).items()):
        if name == "indices" and isinstance(data, Subset):
            continue
        match value:
            case Tensor() | np.ndarray() if value.ndim:
                yield where + name, [f"of shape {list(value.shape)}: {_digest(value)}"]
            case list() | tuple() if value:
                some = [
                    _last_part(part) for each in _samples(value) for part in (each if isinstance(each, list | tuple) else (each,))
                ]
                if all(isinstance(part, (*PLAIN, Tensor, np.ndarray)) for part in some):
                    yield where + name, [f"{len(value)} values: {_of(' '.join(map(_digest, some)).encode())}"]
            case Dataset() if depth:
                yield from _attributes(value, f"{where}{name}.", depth - 1)


def _last_part(leaf: Any) -> Any:
    return os.path.basename(leaf) if isinstance(leaf, str | os.PathLike) else leaf


def _samples(values: Sequence[Any]) -> Sequence[Any]:
    return values[:: max(1, len(values) // MOST_SAMPLES)][:MOST_SAMPLES]


def _lines(data: Any) -> Iterator[str]:
    match data:
        case Subset():
            yield f"a subset, indices {_digest(np.asarray(data.indices))}"
            yield from _lines(data.dataset)
        case ConcatDataset():
            for part in data.datasets:
                yield from _lines(part)
        case TensorDataset():
            yield from (f"a tensor of shape {list(tensor.shape)}: {_digest(tensor)}" for tensor in data.tensors)
        case Tensor() | np.ndarray():
            yield f"a tensor of shape {list(data.shape)}: {_digest(data)}"
        case list() | tuple() if data:
            found = [_digest(leaf) for sample in _samples(data) for leaf in leaves(sample)]
            yield f"a list of {len(data)}: {_of(' '.join(found).encode())}"


def _digest(value: Any) -> str:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return "objects"
        value = value.reshape(-1) if value.flags.c_contiguous else value[:: max(1, len(value) // MOST_SAMPLES)].reshape(-1)
        return _of(np.ascontiguousarray(_some(value)).tobytes())
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_quantized or type(value) is not Tensor:
            return "a tensor of a special kind"
        value = value.detach()
        if value.ndim and not value.is_contiguous():
            value = value[:: max(1, len(value) // MOST_SAMPLES)]
        return _of(_some(value.reshape(-1)).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.number | np.bool_):
        value = value.item()
    return _of(repr(value).encode()) if isinstance(value, bool | int | float | complex | str | bytes) else type(value).__name__


def _some(flat: Any) -> Any:
    return flat[:: max(1, len(flat) // MOST_ELEMENTS)][:MOST_ELEMENTS]


def _of(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()
