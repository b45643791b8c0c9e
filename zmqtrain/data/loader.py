"""A worker's batches, fetched one ahead in a thread, and where a device has memory of its own copied there ahead, too."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate

from zmqtrain.data.background import Background, BackgroundThread
from zmqtrain.data.partition import Indices
from zmqtrain.errors import TaskError

#: Begins to copy a tensor to a device's memory, beside the device's arithmetic. What it returns at once gives the copy, where it is
#: used.
Move: TypeAlias = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some samples: ``model(*inputs)`` is compared with ``target``."""

    inputs: tuple[Any, ...]
    target: Any
    samples: int
    arriving: Callable[[], Batch] | None = field(default=None, repr=False, compare=False)
    """Gives the same batch in the device's memory, if it is on its way there."""

    def split(self, parts: int) -> list[Batch]:
        """Even runs of samples, as views; fewer where there are fewer samples."""
        if parts == 1 or self.samples < 2:
            return [self]
        cuts = np.array_split(np.arange(self.samples), min(parts, self.samples))
        return [
            Batch(_rows(self.inputs, slice(int(c[0]), int(c[-1]) + 1), self.samples),
                  _rows(self.target, slice(int(c[0]), int(c[-1]) + 1), self.samples), len(c))
            for c in cuts
        ]  # fmt: skip

    def part(self, rows: slice) -> Batch:
        """Some of the samples, as views."""
        start, stop, _ = rows.indices(self.samples)
        if (start, stop) == (0, self.samples):
            return self
        return Batch(_rows(self.inputs, rows, self.samples), _rows(self.target, rows, self.samples), stop - start)

    def to(self, device: torch.device) -> Batch:
        """The batch in the device's memory. Called in the compute thread."""
        if self.arriving is not None:
            return self.arriving()
        return self if device.type == "cpu" else Batch(_move(self.inputs, device), _move(self.target, device), self.samples)


class Fetch:
    """Makes batches of a map-style dataset's samples. Runs in any thread.

    A `TensorDataset` is indexed a batch at a time. Python's and numpy's random numbers are seeded for each batch, so augmentation
    by them is repeatable; a dataset that draws from torch's global generator shares it with the model, and is not.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        pin: bool = False,
        channels_last: bool = False,
        move: Move | None = None,
    ) -> None:
        """``pin``: into memory that devices copy from. ``channels_last``: how images (four dimensions) of the inputs lie there.
        ``move``: to where batches are used, as soon as they are made."""
        self._dataset, self._collate, self._transform, self._pin = dataset, collate, transform, pin
        self._move = move
        self._channels_last = channels_last

    def __call__(self, indices: Indices, seed: tuple[int, ...] | None = None) -> Batch:
        """Raises `TaskError` where the dataset, collate or transform raises, or a batch is not (input, target)."""
        return self.finished(indices, lambda: self.collated(indices), seed)

    def finished(self, indices: Indices, collated: Callable[[], Any], seed: tuple[int, ...] | None = None) -> Batch:
        """The batch of samples that were collated already, as ``collated()`` gives them."""
        try:
            if seed is not None and not self._whole():
                state = np.random.SeedSequence(seed).generate_state(2)
                random.seed(int(state[0]))
                np.random.seed(int(state[1]))
            batch = collated()
            if self._transform is not None:
                batch = self._transform(batch)
        except TaskError:
            raise
        except Exception as error:
            what = f"samples {indices[:3].tolist()}{'...' if len(indices) > 3 else ''}"
            raise TaskError(f"making a batch of the task's {what} raised {type(error).__name__}: {error}") from error
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise TaskError(
                f"a batch of the task's data is a {type(batch).__name__}; it must be (input, target): "
                "let data[i] return such a pair"
            )
        if self._channels_last:
            batch = [*(_map(part, _channels_last) for part in batch[:-1]), batch[-1]]
        if self._pin:
            batch = [_map(part, torch.Tensor.pin_memory) for part in batch]
        made = Batch(tuple(batch[:-1]), batch[-1], len(indices))
        return made if self._move is None else _on_its_way(made, self._move)

    def _whole(self) -> bool:
        return type(self._dataset) is TensorDataset and self._collate is None and self._transform is None

    def collated(self, indices: Indices) -> Any:
        """Samples of the dataset, stacked; without the transform."""
        if type(self._dataset) is TensorDataset and self._collate is None:
            rows = torch.from_numpy(indices.copy())
            return [tensor.index_select(0, rows) for tensor in self._dataset.tensors]
        samples = [self._dataset[int(index)] for index in indices]
        return (self._collate or default_collate)(samples)


class Loader:
    """The batches of one worker, by step; the next one is fetched while this one is computed."""

    def __init__(
        self, fetch: Fetch, indices: Callable[[int], Indices], seed: tuple[int, ...], thread: Background | None = None
    ) -> None:
        """``indices(step)``: the worker's samples; ``seed``: distinguishes run and worker; ``thread``: where to fetch, by default
        a thread of its own. It is closed with the loader."""
        self._fetch, self._indices, self._seed = fetch, indices, seed
        self._thread: Background = thread or BackgroundThread("zmqtrain-loader")
        self._ahead: tuple[int, asyncio.Future[Batch]] | None = None

    async def batch(self, step: int, *, ahead: bool = True) -> Batch:
        """The step's batch. ``ahead``: begin to fetch the next step's."""
        if self._ahead is not None and self._ahead[0] == step:
            future = self._ahead[1]
        else:
            self._drop()
            future = self._submit(step)
        self._ahead = None
        batch = await future
        if ahead:
            self._ahead = (step + 1, self._submit(step + 1))
        return batch

    def _submit(self, step: int) -> asyncio.Future[Batch]:
        return self._thread.submit(lambda: self._fetch(self._indices(step), (*self._seed, step)))

    def _drop(self) -> None:
        if self._ahead is not None:
            future = self._ahead[1]
            future.cancel()
            self._ahead = None

    async def close(self, timeout_s: float) -> None:
        self._drop()
        await self._thread.close(timeout_s)


def _on_its_way(batch: Batch, move: Move) -> Batch:
    """The batch, with a copy begun."""
    begun: list[Callable[[], torch.Tensor]] = []

    def begin(tensor: torch.Tensor) -> torch.Tensor:
        begun.append(move(tensor))
        return tensor

    def arrived() -> Batch:
        copies = iter([end() for end in begun])
        inputs, target = _map((batch.inputs, batch.target), lambda _: next(copies))
        return Batch(inputs, target, batch.samples)

    _map((batch.inputs, batch.target), begin)
    return Batch(batch.inputs, batch.target, batch.samples, arrived)


def _map(part: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``part`` with ``function`` of each tensor in it."""
    if isinstance(part, torch.Tensor):
        return function(part)
    if isinstance(part, dict):
        return {key: _map(value, function) for key, value in part.items()}
    if isinstance(part, tuple | list):
        return type(part)([_map(value, function) for value in part])
    return part


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _rows(part: Any, rows: slice, samples: int) -> Any:
    return _map(part, lambda tensor: tensor[rows] if tensor.dim() and tensor.shape[0] == samples else tensor)


def _move(part: Any, device: torch.device) -> Any:
    return _map(part, lambda tensor: tensor.to(device, non_blocking=True))
