"""Which samples the steps of a run take, as checkpoints keep it for a run that goes on with other groups or batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from zmqtrain.data.partition import Since
from zmqtrain.words import counted


@dataclass(frozen=True, slots=True)
class Course:
    """How many samples a step takes, and from where on."""

    groups: int
    batch_size: int
    """The samples of a group in a step."""
    since: Since | None = None
    """Where these groups and batches begin; ``None`` for a stream, of which each reader knows its place."""

    def __str__(self) -> str:
        return f"{counted(self.groups, 'group')} with batch_size = {self.batch_size}"

    @property
    def samples(self) -> int:
        """The number of samples in a step."""
        return self.groups * self.batch_size

    @property
    def begins(self) -> Since:
        """Where they begin. Raises `ValueError` for a stream's."""
        if self.since is None:
            raise ValueError(f"{self} does not say where they begin")
        return self.since

    def divides_as(self, other: Course) -> bool:
        """Whether both have as many groups and as large batches."""
        return (self.groups, self.batch_size) == (other.groups, other.batch_size)

    def to_value(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        found: dict[str, Any] = {"groups": self.groups, "batch_size": self.batch_size}
        return found if self.since is None else {**found, "since": list(astuple(self.since))}

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Course:
        """Decode what `to_value` returned. Raises `ValueError`."""
        match value:
            case {"groups": int(groups), "batch_size": int(batch_size), "since": [int(), int(), int(), int()] as since}:
                if groups > 0 and batch_size > 0 and min(since) >= 0:
                    return cls(groups, batch_size, Since(*since))
            case {"groups": int(groups), "batch_size": int(batch_size)} if "since" not in value:
                if groups > 0 and batch_size > 0:
                    return cls(groups, batch_size)
        raise ValueError(f"{value!r:.100} does not say which samples a step takes")
