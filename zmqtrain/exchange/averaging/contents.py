"""What a group's model contains of the others' batches, with averaging: what the averages had. Sans-IO."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from zmqtrain.data.slots import Life
from zmqtrain.exchange.contents import merge


class AveragedContents:
    """Implements `Contents`. Buckets may be averaged at different steps: what is in all of them counts."""

    def __init__(self) -> None:
        self._copied: dict[Life, int] = {}  # what was in the model that this one began as a copy of
        self._averaged: dict[int, dict[Life, int]] = {}  # bucket -> process -> the step after its last average that had it

    def averaged(self, buckets: Iterable[int], step: int, lives: Collection[Life]) -> None:
        """The averages of these ``buckets`` have the models of these processes as of after ``step``."""
        for bucket in buckets:
            merge(self._averaged.setdefault(bucket, {}), dict.fromkeys(lives, step + 1))

    def begin(self, buckets: Iterable[int]) -> None:
        """The model has these ``buckets``."""
        for bucket in buckets:
            self._averaged.setdefault(bucket, {})

    def got(self, life: Life) -> int:
        in_all = min((each.get(life, 0) for each in self._averaged.values()), default=0)
        return max(self._copied.get(life, 0), in_all)

    def known(self) -> Mapping[Life, int]:
        lives = {*self._copied, *(life for each in self._averaged.values() for life in each)}
        return {life: self.got(life) for life in lives}

    def begin_with(self, known: Mapping[Life, int]) -> None:
        merge(self._copied, known)
