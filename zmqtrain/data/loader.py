"""A worker's batches, fetched ahead by a thread or by processes, and copied ahead to a device with memory of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate

from zmqtrain.data.background import Background, BackgroundThread
from zmqtrain.data.batch import Batch, Move, batch_of
from zmqtrain.data.draws import drawn_from
from zmqtrain.data.nested import PLAIN, mapped
from zmqtrain.data.partition import Indices
from zmqtrain.data.processes import LoaderProcesses, Processes, Request
from zmqtrain.errors import TaskError

Collate = Callable[[list[Any]], Any]
Transform = Callable[[Any], Any]
#: Makes a `Batch` from collated samples and their number.
Make = Callable[[Any, int], Batch]


class Reader:
    """Reads samples of a map-style dataset, and collates and transforms them, with the same result in any thread or process.

    A `TensorDataset` is indexed a batch at a time, and a dataset with ``__getitems__`` is asked for a batch at a time. What the
    code draws from Python's, numpy's and torch's global generators follows from the request's seed alone.
    """

    def __init__(self, dataset: Any, collate: Collate | None = None, transform: Transform | None = None) -> None:
        self.dataset, self._collate, self._transform = dataset, collate, transform

    def __call__(self, request: Request) -> Any:
        """Returns the transformed batch. Raises `TaskError` if the dataset, collate or transform raises."""
        return self.prepared(request.indices, lambda: self.collated(request.indices), request.seed)

    def prepared(self, indices: Indices, collated: Callable[[], Any], seed: Sequence[int] | None) -> Any:
        """Transform a batch of samples that were already collated, as ``collated()`` returns it."""
        try:
            if seed is None or (self._whole and self._transform is None):
                return self._transformed(collated())
            with drawn_from(seed):
                return self._transformed(collated())
        except TaskError:
            raise
        except Exception as error:
            what = f"samples {indices[:3].tolist()}{'...' if len(indices) > 3 else ''}"
            raise TaskError(f"making a batch of the task's {what} raised {type(error).__name__}: {error}") from error

    def collated(self, indices: Indices) -> Any:
        """The samples with these indices, stacked but not transformed."""
        if self._whole:
            rows = torch.from_numpy(indices.copy())
            return [tensor.index_select(0, rows) for tensor in self.dataset.tensors]
        if getattr(self.dataset, "__getitems__", None) is not None:
            samples = self.dataset.__getitems__(indices.tolist())
        else:
            samples = [self.dataset[int(index)] for index in indices]
        return self.together(samples)

    def together(self, samples: list[Any]) -> Any:
        """Collate samples into a batch, without the transform."""
        return (self._collate or default_collate)(samples)

    @property
    def _whole(self) -> bool:
        return type(self.dataset) is TensorDataset and self._collate is None

    def _transformed(self, batch: Any) -> Any:
        return batch if self._transform is None else self._transform(batch)


@dataclass(frozen=True, slots=True)
class Finish:
    """The work on a batch between reading it and using it."""

    make: Make = batch_of
    """Separates inputs from targets."""
    pin: bool = False
    """Whether to copy the batch to pinned memory, from which devices can copy directly."""
    channels_last: bool = False
    """Whether images (four dimensions) among the inputs are laid out with channels last."""
    move: Move | None = None
    """Moves a batch to its device as soon as it is made."""

    def __call__(self, read: Any, samples: int) -> Batch:
        """Returns the finished batch. Raises `TaskError` if it is not a valid batch of a task. May run in any thread of the
        worker."""
        batch = self.make(read, samples)
        if self.channels_last:
            batch = batch.with_inputs(lambda part: mapped(part, _channels_last))
        if self.pin:
            batch = batch.mapped(lambda part: mapped(part, torch.Tensor.pin_memory, _pinned))
        return batch if self.move is None else batch.on_its_way(self.move)


class Fetch:
    """Makes batches of a map-style dataset's samples, ready for the device. May run in any thread."""

    def __init__(self, reader: Reader, finish: Finish | None = None) -> None:
        self.reader, self.finish = reader, finish or Finish()

    def __call__(self, indices: Indices, seed: Sequence[int] | None = None) -> Batch:
        """The batch of the samples with these indices. Raises `TaskError` if the dataset, collate or transform raises, or the batch
        is not valid."""
        return self.finished(indices, lambda: self.reader.collated(indices), seed)

    def finished(self, indices: Indices, collated: Callable[[], Any], seed: Sequence[int] | None = None) -> Batch:
        """The batch of samples that were already collated, as ``collated()`` returns them."""
        return self.finish(self.reader.prepared(indices, collated, seed), len(indices))


class Loader:
    """The batches of one worker, by step; the next one is fetched while this one is computed."""

    def __init__(
        self,
        fetch: Fetch,
        indices: Callable[[int], Indices],
        seed: tuple[int, ...],
        thread: Background | None = None,
        *,
        processes: Processes | None = None,
        epoch_steps: int = 0,
        place: Callable[[int], tuple[int, ...]] | None = None,
    ) -> None:
        """
        Args:
            indices: ``indices(step)`` returns the worker's samples.
            seed: distinguishes run and worker.
            thread: where to fetch, by default a thread of its own; closed with the loader.
            processes: processes that read for the thread.
            epoch_steps: the steps of an epoch, after which the processes are started again unless they persist.
            place: ``place(step)`` distinguishes the batch from all others, beside ``seed``; by default the step.
        """
        self._fetch, self._indices, self._seed = fetch, indices, seed
        self._thread: Background = thread or BackgroundThread("zmqtrain-loader")
        self._place = place or (lambda step: (step,))
        self._era: object = None
        self._ahead: tuple[int, asyncio.Future[Batch]] | None = None
        self._processes: LoaderProcesses | None = None
        if processes is not None:
            self._processes = LoaderProcesses(fetch.reader, self._request, processes, epoch_steps)

    async def batch(self, step: int, *, ahead: bool = True, era: object = None) -> Batch:
        """The batch of ``step``. ``ahead``: start to fetch the next step's. ``era``: what ``indices`` goes by; if it is another
        object than for the batch before, what was read ahead is forgotten."""
        if self._era is not None and era is not self._era:
            await self._start_again()
        self._era = era
        if self._ahead is not None and self._ahead[0] == step:
            future = self._ahead[1]
        else:
            self._drop()
            future = self._submit(step)
        self._ahead = None
        batch = await future
        if ahead:
            if self._processes is not None and self._processes.begins_with(step + 1):  # now, since nothing is being computed
                await self._thread.submit(partial(self._processes.prepare, step + 1))
            self._ahead = (step + 1, self._submit(step + 1))
        return batch

    async def _start_again(self) -> None:
        """Forget what was read ahead: ``indices`` gives others from now on."""
        self._drop()
        if self._processes is not None:
            await self._thread.submit(self._processes.renew)

    def _request(self, step: int) -> Request:
        return Request(step, self._indices(step), (*self._seed, *self._place(step)))

    def _read(self, step: int) -> Batch:
        request = self._request(step)
        read = self._fetch.reader(request) if self._processes is None else self._processes.take(request)
        return self._fetch.finish(read, len(request.indices))

    def _submit(self, step: int) -> asyncio.Future[Batch]:
        return self._thread.submit(lambda: self._read(step))

    def _drop(self) -> None:
        if self._ahead is not None:
            future = self._ahead[1]
            future.cancel()
            self._ahead = None

    async def close(self, timeout_s: float) -> None:
        self._drop()
        if self._processes is not None:
            self._thread.submit(self._processes.renew)  # in the thread that started them
        await self._thread.close(timeout_s)


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if not isinstance(leaf, PLAIN) and callable(getattr(leaf, "pin_memory", None)) else leaf


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
