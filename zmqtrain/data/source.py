"""Where samples come from, as a person gives it: a map-style dataset, a stream, or a `torch.utils.data.DataLoader` of either.

Of a DataLoader everything counts but how it divides an epoch into batches, since that is for the run to say:

* its dataset, ``collate_fn``, ``num_workers``, ``pin_memory``, ``prefetch_factor``, ``persistent_workers``, ``worker_init_fn``,
  ``multiprocessing_context`` and ``timeout`` are taken;
* its order is taken: ``shuffle=True`` is a new order each epoch from the job's seed, ``shuffle=False`` the dataset's, and a
  sampler's own indices are drawn from the job's seed, alike on all workers;
* its ``batch_size`` must be the one of a group; what does not fill a step of all groups is left out, whatever ``drop_last`` says;
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

#: ``shard(dataset, rank, world)``: the part of a stream that one worker of ``world`` reads.
Shard = Callable[[Any, int, int], Any]
Order = Literal["job", "sequential", "shuffled", "sampler"]


@dataclass(frozen=True, slots=True)
class Source:
    """A person's data, checked."""

    name: str
    """The name of the data in error messages."""
    dataset: Any
    stream: bool = False
    """Whether it can only be read from its beginning."""
    collate: Collate | None = None
    transform: Transform | None = None
    processes: Processes | None = None
    pin: bool | None = None
    """``None``: where a device copies from it."""
    shard: Shard | None = None
    order: Order = "job"
    sampler: Any = None
    batch_size: int | None = None
    """That a DataLoader names."""

    @property
    def samples(self) -> int:
        """Of the dataset. Raises `UsageError` for a stream."""
        if self.stream:
            raise UsageError(f"{self.name} is a stream, and nobody knows how many samples it has: this needs a map-style dataset")
        return len(self.dataset)

    def require(self, batch_size: int, shuffle: Literal["global", "none", "ring"]) -> None:
        """Raise `UsageError` where the topology says otherwise."""
        if self.batch_size is not None and self.batch_size != batch_size:
            raise UsageError(
                f"{self.name} is a DataLoader with batch_size = {self.batch_size}, but a group takes {batch_size} samples a step "
                "([compute] batch_size): make them equal"
            )
        if self.order != "job" and shuffle == "ring":
            raise UsageError(
                f'[data] shuffle = "ring" has an order of its own, and so has a DataLoader: give {self.name} its dataset'
            )
        if self.order in ("shuffled", "sampler") and shuffle == "none":
            raise UsageError(f'[data] shuffle = "none", but {self.name} is a DataLoader that shuffles: leave one of the two out')
        if self.stream and shuffle == "ring":
            raise UsageError(f'[data] shuffle = "ring" needs to know all samples, and {self.name} is a stream: leave it out')

    def order_of(self, seed: int) -> SampledOrder | None:
        """The sampler's order, where there is one."""
        return SampledOrder(self.name, self.sampler, seed) if self.order == "sampler" else None

    def shuffle(self, asked: Literal["global", "none", "ring"]) -> Literal["global", "none"]:
        """How an epoch is ordered, where no sampler does it. ``asked``: by ``[data] shuffle``."""
        if self.order == "job":
            return "none" if asked == "none" else "global"
        return "none" if self.order == "sequential" else "global"


class SampledOrder:
    """The samples of each epoch, as a sampler gives them: the same on all workers."""

    def __init__(self, name: str, sampler: Any, seed: int) -> None:
        """Raises `TaskError` for a sampler that cannot be the same everywhere."""
        self._name, self._sampler, self._seed = name, sampler, seed
        self._kept: dict[int, Indices] = {}
        first = self(0)
        self.samples = len(first)
        """Of an epoch."""
        self._kept.clear()
        if not np.array_equal(first, self(0)):
            raise TaskError(
                f"the sampler {type(sampler).__name__} of {name} gives another order each time, though it is seeded alike: it "
                "draws from something else than its `generator` or the global generators of torch, numpy and Python, so no two "
                "workers would have the same order. Let it draw from one of these, or give it set_epoch(epoch)"
            )

    def __call__(self, epoch: int) -> Indices:
        """In any thread, one call at a time. Raises `TaskError`."""
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
            raise TaskError(f"the sampler of {self._name} gives {drawn[0]!r:.60}; it must give whole numbers")
        found = np.array([int(index) for index in drawn], np.int64)
        found.flags.writeable = False
        if len(found) != getattr(self, "samples", len(found)):
            raise TaskError(
                f"the sampler of {self._name} gives {len(found)} samples in epoch {epoch}, and {self.samples} in the first: it "
                "must give as many in each"
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
    """What ``data`` is. The settings are for a dataset; a DataLoader has its own. Raises `TaskError`."""
    if isinstance(data, DataLoader):
        doubled = [
            what for what, given in (("collate", collate), ("num_workers", processes), ("pin_memory", pin)) if given is not None
        ]
        if doubled:
            raise TaskError(f"{name} is a DataLoader, which says itself what {doubled[0]} is: say it in one place")
        source = _of_loader(name, data, transform, shard)
    else:
        _check(name, data)
        stream = _is_stream(data)
        source = Source(name, data, stream, collate, transform, processes, pin, shard)
    if source.stream and source.shard is None and source.processes is not None and source.processes.num_workers > 1:
        raise TaskError(
            f"{name} is a stream, and num_workers = {source.processes.num_workers}: each process would give all of it again, "
            "unless it divides itself over them (torch.utils.data.get_worker_info). If it does, say so with "
            "shard(dataset, rank, world). If not, set num_workers = 1"
        )
    if source.shard is not None and not source.stream:
        raise TaskError(f"{name} is a map-style dataset, which is divided by itself: shard is for streams")
    return source


def _check(name: str, data: Any) -> None:
    if isinstance(data, Mapping):
        parts = ", ".join(map(repr, list(data)[:4]))
        raise TaskError(
            f"{name} is a {type(data).__name__} of {parts}: give one of them, such as data[{next(iter(data), 'train')!r}]"
        )
    if isinstance(data, str | bytes):
        raise TaskError(f"{name} is a text; it must be a dataset")
    if _is_stream(data):
        return
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise TaskError(
            f"{name} is a {type(data).__name__}; it must be a map-style dataset, with len(data) and data[i], a stream of samples "
            "with iter(data), or a DataLoader of either"
        )
    if len(data) == 0:
        raise TaskError(f"{name} is empty: it must hold at least one sample; is the data path right?")


def _is_stream(data: Any) -> bool:
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


def _of_loader(name: str, loader: DataLoader[Any], transform: Transform | None, shard: Shard | None) -> Source:
    own = type(loader)
    if own.__iter__ is not DataLoader.__iter__ and not own.__module__.startswith("torchdata."):
        raise TaskError(
            f"{name} is a {own.__name__}, which iterates in a way of its own, so it is not known what a worker's part of it would "
            "be: give its dataset, or a plain torch.utils.data.DataLoader"
        )
    if not getattr(loader, "in_order", True):
        raise TaskError(f"{name} is a DataLoader with in_order=False, so nobody could tell which samples were taken: leave it out")
    dataset, batches = loader.dataset, loader.batch_sampler
    _check(name, dataset)
    if batches is None:
        raise TaskError(
            f"{name} is a DataLoader with batch_size=None: give it the batch size of a group, and let the dataset give samples"
        )
    if not isinstance(batches, BatchSampler) or own_class(batches) != "BatchSampler":
        raise TaskError(
            f"{name} is a DataLoader with the batch sampler {type(batches).__name__}. Groups divide batches by themselves: give "
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
    """The name of torch's class, or of torchdata's that stands for it."""
    kind = type(thing)
    return kind.__name__ if kind.__module__.startswith(("torch.", "torchdata.")) else ""


def _order(name: str, sampler: Any, dataset: Any) -> tuple[Order, Any]:
    if isinstance(sampler, DistributedSampler):
        raise TaskError(
            f"{name} is a DataLoader with a DistributedSampler, which divides the samples over workers; so does the run: leave it "
            "out (shuffle=True shuffles)"
        )
    if type(sampler) is SequentialSampler:
        return "sequential", None
    if own_class(sampler) == RandomSampler.__name__ and not sampler.replacement and sampler.num_samples == len(dataset):
        return "shuffled", None
    return "sampler", sampler
