"""Where samples come from, as the user gives them: a map-style dataset, a stream, or a `torch.utils.data.DataLoader` of either.

Everything about a DataLoader is respected except how it divides an epoch into batches, which the run decides:

* its dataset, ``collate_fn``, ``num_workers``, ``pin_memory``, ``prefetch_factor``, ``persistent_workers``, ``worker_init_fn``,
  ``multiprocessing_context`` and ``timeout`` are used;
* its order is used: ``shuffle=True`` is a new order each epoch from the job's seed, ``shuffle=False`` the dataset's, and a
  sampler's own indices are drawn with the job's seed, equally on all workers;
* its ``batch_size`` must be that of a group; samples that do not fill a step of all groups are left out, whatever ``drop_last`` is;
* a batch sampler, ``batch_size=None``, a `DistributedSampler` and ``in_order=False`` are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from zmqtrain.data.draws import drawn_from
from zmqtrain.data.loader import Collate, Transform
from zmqtrain.data.partition import Indices
from zmqtrain.data.processes import Processes
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.words import typed

#: ``shard(dataset, rank, world)``: the part of a stream that one worker of ``world`` reads.
Shard = Callable[[Any, int, int], Any]
Order = Literal["job", "sequential", "shuffled", "sampler"]


@dataclass(frozen=True, slots=True)
class Source:
    """The user's data, checked."""

    name: str
    """The name of the data in error messages."""
    dataset: Any
    stream: bool = False
    """Whether it can only be read from its beginning."""
    collate: Collate | None = None
    transform: Transform | None = None
    processes: Processes | None = None
    pin: bool | None = None
    """``None``: only if a device copies from it."""
    shard: Shard | None = None
    order: Order = "job"
    sampler: Any = None
    batch_size: int | None = None
    """The batch size of a DataLoader."""

    @property
    def samples(self) -> int:
        """The number of samples of the dataset. Raises `UsageError` for a stream."""
        if self.stream:
            raise UsageError(f"{self.name} is a stream, so its number of samples is not known: this needs a map-style dataset")
        return len(self.dataset)

    def require(self, batch_size: int, shuffle: Literal["global", "none", "ring"]) -> None:
        """Raise `UsageError` if the data contradicts these settings of the topology."""
        if self.batch_size is not None and self.batch_size != batch_size:
            raise UsageError(
                f"{self.name} is a DataLoader with batch_size = {self.batch_size}, but a group takes {batch_size} samples a step "
                "([compute] batch_size): make them equal"
            )
        if self.order != "job" and shuffle == "ring":
            raise UsageError(
                '[data] shuffle = "ring" determines the order of samples, and so does a DataLoader: pass the dataset of '
                f"{self.name}"
            )
        if self.order in ("shuffled", "sampler") and shuffle == "none":
            how = "shuffles" if self.order == "shuffled" else "has a sampler"
            raise UsageError(f'[data] shuffle = "none", but {self.name} is a DataLoader that {how}: remove one of the two settings')
        if self.stream and shuffle == "ring":
            raise UsageError(
                f'[data] shuffle = "ring" needs a known number of samples, but {self.name} is a stream: remove the setting'
            )

    def order_of(self, seed: int) -> SampledOrder | None:
        """The sampler's order, if there is a sampler."""
        return SampledOrder(self.name, self.sampler, seed) if self.order == "sampler" else None

    def shuffle(self, asked: Literal["global", "none", "ring"]) -> Literal["global", "none"]:
        """How an epoch is ordered if there is no sampler. ``asked``: the value of ``[data] shuffle``."""
        if self.order == "job":
            return "none" if asked == "none" else "global"
        return "none" if self.order == "sequential" else "global"


class SampledOrder:
    """The samples of each epoch, as a sampler gives them: the same on all workers."""

    def __init__(self, name: str, sampler: Any, seed: int) -> None:
        """Raises `TaskError` if the sampler cannot be made to give the same order on all workers."""
        self._name, self._sampler, self._seed = name, sampler, seed
        self._kept: dict[int, Indices] = {}
        first = self(0)
        self.samples = len(first)
        """The number of samples in an epoch."""
        self._kept.clear()
        if not np.array_equal(first, self(0)):
            raise TaskError(
                f"the sampler {type(sampler).__name__} of {name} gives a different order each time, although it gets the same "
                "seed: it draws from something other than its `generator` or the global generators of torch, numpy and Python, so "
                "the workers would have different orders. Let it draw from one of these, or give it a method set_epoch(epoch)"
            )

    def __call__(self, epoch: int) -> Indices:
        """The samples of an epoch. May be called in any thread, one call at a time. Raises `TaskError`."""
        found = self._kept.get(epoch)
        if found is None:
            found = self._drawn(epoch)
            self._kept = {**{key: value for key, value in self._kept.items() if key == epoch - 1}, epoch: found}
        return found

    def _drawn(self, epoch: int) -> Indices:
        sampler = self._sampler
        try:
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)
            generator = getattr(sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(int(np.random.SeedSequence([self._seed, epoch]).generate_state(1)[0]))
            with drawn_from((self._seed, epoch)):
                drawn = list(sampler)
        except Exception as error:
            raise TaskError(f"the sampler of {self._name} raised {type(error).__name__}: {error}") from error
        if not all(isinstance(index, int | np.integer | torch.Tensor) for index in drawn):
            raise TaskError(f"the sampler of {self._name} gave {drawn[0]!r:.60}; it must give whole numbers")
        found = np.array([int(index) for index in drawn], np.int64)
        found.flags.writeable = False
        if len(found) != getattr(self, "samples", len(found)):
            raise TaskError(
                f"the sampler of {self._name} gave {len(found)} samples in epoch {epoch}, but {self.samples} in the first epoch: "
                "it must give the same number in each epoch"
            )
        return found


def source_of(
    name: str,
    data: Any,
    *,
    collate: Collate | None = None,
    transform: Transform | None = None,
    processes: Processes | None = None,
    pin: bool | None = None,
    shard: Shard | None = None,
) -> Source:
    """Check the user's ``data``. The settings are for a dataset or stream; a DataLoader has its own. Raises `TaskError`."""
    if isinstance(data, DataLoader):
        doubled = [
            what for what, given in (("collate", collate), ("num_workers", processes), ("pin_memory", pin)) if given is not None
        ]
        if doubled:
            raise TaskError(f"{name} is a DataLoader, which has its own {doubled[0]}: set it only there")
        source = _of_loader(name, data, transform, shard)
    else:
        _check(name, data)
        stream = _is_stream(data)
        source = Source(name, data, stream, collate, transform, processes, pin, shard)
    if source.stream and source.shard is None and source.processes is not None and source.processes.num_workers > 1:
        raise TaskError(
            f"{name} is a stream, and num_workers = {source.processes.num_workers}: each process would read all of it, unless the "
            "stream divides itself between them (torch.utils.data.get_worker_info). If it does, say so with "
            "shard(dataset, rank, world). If not, set num_workers = 1"
        )
    if source.shard is not None and not source.stream:
        raise TaskError(f"{name} is a map-style dataset, which is divided automatically: shard is only for streams")
    return source


def _check(name: str, data: Any) -> None:
    if isinstance(data, Mapping):
        if data and all(isinstance(key, int) for key in data):
            raise TaskError(f"{name} is {typed(data)} of samples by number: pass a list, such as list(data.values())")
        parts = ", ".join(map(repr, list(data)[:4]))
        raise TaskError(f"{name} is {typed(data)} of {parts}: pass one of them, such as data[{next(iter(data), 'train')!r}]")
    if isinstance(data, str | bytes):
        raise TaskError(f"{name} is a string; it must be a dataset")
    if _is_stream(data):
        return
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise TaskError(
            f"{name} is {typed(data)}; it must be a map-style dataset, with len(data) and data[i], a stream of samples "
            "with iter(data), or a DataLoader of either"
        )
    if len(data) == 0:
        raise TaskError(f"{name} is empty: it must have at least one sample; is the data path correct?")


def _is_stream(data: Any) -> bool:
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


def _of_loader(name: str, loader: DataLoader[Any], transform: Transform | None, shard: Shard | None) -> Source:
    own = type(loader)
    if own.__iter__ is not DataLoader.__iter__ and not own.__module__.startswith("torchdata."):
        raise TaskError(
            f"{name} is a {own.__name__} with its own way to iterate, so it is not known which part a worker should read: "
            "pass its dataset, or a plain torch.utils.data.DataLoader"
        )
    if not getattr(loader, "in_order", True):
        raise TaskError(
            f"{name} is a DataLoader with in_order=False, so it would not be known which samples were used: remove in_order"
        )
    dataset, batches = loader.dataset, loader.batch_sampler
    _check(name, dataset)
    if batches is None:
        raise TaskError(
            f"{name} is a DataLoader with batch_size=None: set it to the batch size of a group, and let the dataset return samples"
        )
    if not isinstance(batches, BatchSampler) or own_class(batches) != "BatchSampler":
        raise TaskError(
            f"{name} is a DataLoader with the batch sampler {type(batches).__name__}. The run divides batches itself: use "
            "batch_size and a sampler"
        )
    stream = _is_stream(dataset)
    order: Order = "sequential"
    sampler: Any = None
    if not stream:
        order, sampler = _order(name, batches.sampler, dataset)
    collate: Any = None if loader.collate_fn is default_collate else loader.collate_fn
    processes = None
    if loader.num_workers:
        processes = Processes(
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=loader.timeout,
        )
    pin = True if loader.pin_memory else None
    return Source(name, dataset, stream, collate, transform, processes, pin, shard, order, sampler, batches.batch_size)


def own_class(thing: object) -> str:
    """The name of a class of torch, or of torchdata's class that replaces it."""
    kind = type(thing)
    return kind.__name__ if kind.__module__.startswith(("torch.", "torchdata.")) else ""


def _order(name: str, sampler: Any, dataset: Any) -> tuple[Order, Any]:
    if isinstance(sampler, DistributedSampler):
        raise TaskError(
            f"{name} is a DataLoader with a DistributedSampler, which divides the samples over workers, as the run does itself: "
            "remove it (shuffle=True shuffles)"
        )
    source: Any = getattr(sampler, "data_source", None)  # torch's are of this length, whatever the dataset's is
    whole = source is dataset or (hasattr(source, "__len__") and len(source) == len(dataset))
    if type(sampler) is SequentialSampler and whole:
        return "sequential", None
    shuffles = own_class(sampler) == RandomSampler.__name__ and not sampler.replacement
    if shuffles and whole and sampler.num_samples == len(dataset):
        return "shuffled", None
    return "sampler", sampler
