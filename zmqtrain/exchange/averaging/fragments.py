"""The schedule of averaging: which fragments of the model are averaged after which step. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fragments:
    """Bucket i belongs to fragment i mod ``count``, so that each fragment has layers of all depths. The fragments take turns,
    spread evenly over ``every`` steps (Streaming DiLoCo). Decided by the step's number and not by a counter, so that a resumed run
    does the same."""

    every: int
    count: int = 1
    delay: int = 0
    """Steps from the start of a fragment's averaging to the step at which the average is applied."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"models are averaged every {self.every} steps; it must be at least every step (1)")
        if not 1 <= self.count <= self.every:
            raise ValueError(f"{self.count} fragments cannot take turns within {self.every} steps")
        if not 0 <= self.delay < self.every:
            raise ValueError(f"a fragment's average takes {self.delay} steps, but the next one starts after {self.every}")

    def begins(self, step: int, bucket: int) -> bool:
        """Whether averaging of the bucket starts after ``step``."""
        return step >= 0 and (step + 1 + (bucket % self.count) * self.every // self.count) % self.every == 0

    def ends(self, step: int, bucket: int) -> bool:
        """Whether the bucket's average is applied after ``step``."""
        return self.begins(step - self.delay, bucket)
