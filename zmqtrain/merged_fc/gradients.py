"""The FC server's gradients: one set per group while its step is computed, then summed in the order of groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GroupGradients:
    """Sets of gradients, one tensor per parameter. If each group's gradients are applied separately, there is only one set.

    Sums are made in the order of groups, so they do not depend on which group was first. A set is added as soon as all sets before
    it are complete, and its memory is used again.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._free: list[list[Tensor]] = []
        self._of: dict[int, list[Tensor]] = {}
        self._begun: set[int] = set()
        self._waiting: dict[int, list[Tensor]] = {}
        self._total: list[Tensor] | None = None
        self._folded: list[int] = []

    def begun(self, group: int) -> bool:
        """Whether the group's set holds gradients of this step."""
        return group in self._begun

    def of(self, group: int) -> list[Tensor]:
        """The group's set; its content is undefined until it is `begun`."""
        if group not in self._of:
            self._of[group] = self._free.pop() if self._free else [torch.empty_like(each) for each in self._parameters]
        return self._of[group]

    def written(self, group: int) -> None:
        """The group's set now holds gradients."""
        self._begun.add(group)

    def complete(self, group: int, expected: Sequence[int]) -> None:
        """The group's step is complete. ``expected``: all groups of the sum, in order."""
        self._begun.discard(group)
        self._waiting[group] = self._of.pop(group)
        for each in expected[len(self._folded) :]:
            if each not in self._waiting:
                break
            self._fold(each)

    def discard(self, group: int) -> None:
        """The group's set is not needed."""
        self._begun.discard(group)
        self._free.append(self._of.pop(group))

    def mean(self) -> list[Tensor]:
        """The mean of all complete sets. Call `release` when it has been used."""
        for group in sorted(self._waiting):
            self._fold(group)
        assert self._total is not None
        factor = 1.0 / len(self._folded)
        if factor != 1.0:
            for each in self._total:
                each.mul_(factor)
        return self._total

    def release(self) -> None:
        """The mean has been used, and its memory is free."""
        assert self._total is not None
        self._free.append(self._total)
        self._total, self._folded = None, []

    def _fold(self, group: int) -> None:
        own = self._waiting.pop(group)
        self._folded.append(group)
        if self._total is None:
            self._total = own
            return
        for total, each in zip(self._total, own, strict=True):
            total.add_(each)
        self._free.append(own)
