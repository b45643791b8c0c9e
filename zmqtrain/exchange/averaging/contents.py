"""What a group's model contains of the others' batches, with averaging: what the averages had. Sans-IO.

A group that comes begins as a copy, which contains what others may not have yet. It says so in its first average, and after that
all have it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from zmqtrain.data.slots import Life
from zmqtrain.exchange.contents import merge


class AveragedContents:
    """Implements `Contents`. Buckets may be averaged at different steps: what is in all of them counts."""

    def __init__(self) -> None:
        self.copied: dict[Life, int] = {}
        """What was in the model that this one began as a copy of."""
        self._averaged: dict[int, dict[Life, int]] = {}  # bucket -> process -> the step after its last average that had it

    def averaged(self, buckets: Iterable[int], step: int, lives: Collection[Life], copied: Mapping[Life, int]) -> None:
        """The averages of these ``buckets`` have the models of these processes as of after ``step``, and what is `copied` in those
        of them that are new."""
        for bucket in buckets:
            merge(self._averaged.setdefault(bucket, {}), {**copied, **dict.fromkeys(lives, step + 1)})

    def begin(self, buckets: Iterable[int]) -> None:
        """The model has these ``buckets``."""
        for bucket in buckets:
            self._averaged.setdefault(bucket, {})

    def got(self, life: Life) -> int:
        in_all = min((each.get(life, 0) for each in self._averaged.values()), default=0)
        return max(self.copied.get(life, 0), in_all)

    def known(self) -> Mapping[Life, int]:
        lives = {*self.copied, *(life for each in self._averaged.values() for life in each)}
        return {life: self.got(life) for life in lives}

    def begin_with(self, known: Mapping[Life, int]) -> None:
        merge(self.copied, known)
