"""The samples of an evaluation, divided over workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from zmqtrain.data.batch import Batch
from zmqtrain.data.draws import drawn_from
from zmqtrain.data.loader import Fetch, Finish
from zmqtrain.data.partition import even_bounds
from zmqtrain.data.source import Source
from zmqtrain.errors import TaskError
from zmqtrain.train.batches import reader_of
from zmqtrain.train.task import user_code
from zmqtrain.words import counted, typed

#: So few samples are not divided over workers.
FEW = 16


class EvaluationData:
    """The samples of ``Task.eval_data``, each once. A stream must give the same samples in the same order every time."""

    def __init__(self, source: Source, finish: Finish) -> None:
        self._source, self._finish = source, finish
        if isinstance(source.dataset, Iterator) and type(source.dataset).__module__ in ("builtins", "itertools"):
            raise TaskError(
                f"{source.name} is {typed(source.dataset)}, which can be read only once: pass a list of its samples, or "
                "an object whose __iter__ starts again each time, like an IterableDataset"
            )
        order = None if source.stream else source.order_of(0)
        self._order = order(0) if order is not None else np.arange(0 if source.stream else len(source.dataset))
        self._fetch = Fetch(reader_of(source), finish)
        self._given: int | None = None  # samples of the stream, the first time

    @property
    def stream(self) -> bool:
        """Whether the number of samples is not known."""
        return self._source.stream

    @property
    def samples(self) -> int:
        """The number of samples. Raises `UsageError` for a stream."""
        return self._source.samples if self._source.stream else len(self._order)

    def single(self, batch_size: int) -> bool:
        """Whether all samples are one batch, of one worker; of a stream this is not known."""
        return not self._source.stream and (len(self._order) <= batch_size or 1 < batch_size == len(self._order) - 1)

    def batch(self, first: int, last: int) -> Batch:
        """The samples from ``first`` up to, but not including, ``last``. What is drawn for them is the same in each evaluation, and
        what training draws goes on as if nothing had been drawn."""
        with drawn_from((0, 2, first), restore=True):
            return self._fetch(self._order[first:last])

    def share(self, parts: int, part: int, batch_size: int) -> Iterator[Batch]:
        """Part number ``part`` of ``parts`` even parts, in batches. Raises `TaskError` if the user's code raises.

        There are no more parts than full batches, or `FEW` samples each, and no batch of a single sample, if that can be: in one
        batch any metric is right, and the more samples a worker has, the more they show whether a metric is a mean."""
        if self._source.stream:
            yield from self._share_of_stream(parts, part, batch_size)
            return
        parts = min(parts, -(-self.samples // max(batch_size, FEW)))
        start, stop = even_bounds(self.samples, parts, part) if part < parts else (0, 0)
        while start < stop:
            last = start + batch_size
            last = stop if last >= stop or (last == stop - 1 and batch_size > 1) else last
            yield self.batch(start, last)
            start = last

    def _share_of_stream(self, parts: int, part: int, batch_size: int) -> Iterator[Batch]:
        """Every ``parts``-th batch of the stream, beginning with number ``part``."""
        reader, number = reader_of(self._source), 0
        with user_code(f"reading {self._source.name}, a stream,"), drawn_from((0, 0), restore=True):
            samples = iter(self._source.dataset)
        while True:
            with user_code(f"reading {self._source.name}, a stream,"), drawn_from((0, 1, number), restore=True):
                chunk = list(islice(samples, batch_size))
                content = reader.together(chunk) if chunk and number % parts == part else None
            if content is not None:
                yield self._finish(content, len(chunk))
            if len(chunk) < batch_size:
                self._require_as_before(number * batch_size + len(chunk))
                return
            number += 1

    def _require_as_before(self, given: int) -> None:
        """Raise `TaskError` unless the stream has as many samples as before, and some."""
        name, before = self._source.name, self._given
        if not given and not before:
            raise TaskError(f"{name} is a stream and has no samples; is the data path correct?")
        if before not in (None, given):
            raise TaskError(
                f"{name} is a stream that has given {counted(given, 'sample')} to this evaluation, and {before:,} to the one "
                "before: it must start again each time iter() is called on it, and give the same samples"
            )
        self._given = given
