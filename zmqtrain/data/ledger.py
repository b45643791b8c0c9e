"""What happens to samples: the promises of each kind of source, and an account of the samples that go around the ring."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from zmqtrain.data.partition import Partition
from zmqtrain.data.source import Source
from zmqtrain.events import EventValue

#: This many lost samples are named; the rest are only counted.
MOST_NAMED = 100


@dataclass(frozen=True, slots=True)
class Promise:
    """What a run can say about its samples before it begins. It is part of the summary."""

    source: str
    """dataset, ring, stream or parts of a stream."""
    order: str
    """Where the order of an epoch comes from."""
    each: str
    """How often a sample is trained on in an epoch."""
    resumed: str
    """Which samples a resumed run trains on."""

    @classmethod
    def of_dataset(cls, source: Source, partition: Partition, *, survives: bool = False) -> Promise:
        """The promise for a map-style dataset. ``survives``: others train what lost workers have left."""
        left = partition.samples % partition.step_samples
        rest = f"; the last {left} of {partition.samples}, which do not fill a step, are left out" if left else ""
        if source.order == "sampler":
            order, each = "the sampler's, seeded by the job", f"as often as the sampler gives it{rest}"
        else:
            order = "the dataset's" if partition.shuffle == "none" else "a new one each epoch, from the job's seed"
            each = f"once, also if workers are lost{rest}" if survives else f"once{rest}"
        return cls("dataset", order, each, "those of the uninterrupted run, augmented with the same random numbers")

    @classmethod
    def of_ring(cls, *, survives: bool) -> Promise:
        """The promise for a ring. ``survives``: the run continues without lost members."""
        each = "once while no worker is lost; the ledger says what happened to the other samples" if survives else "once"
        return cls("ring", "each group's part, which then moves on to the next group", each, "the same order")

    @classmethod
    def of_stream(cls, source: Source) -> Promise:
        """The promise for a stream, whose length is not known."""
        stateful = hasattr(source.dataset, "state_dict") and hasattr(source.dataset, "load_state_dict")
        resumed = (
            "those that follow the stream's saved state"
            if stateful
            else "those that follow after the samples up to the checkpoint have been read again and skipped"
        )
        if source.shard is None:
            return cls("stream", "the stream's", "once; samples at the end that do not fill a step are left out", resumed)
        return cls(
            "parts of a stream",
            "each part's",
            "as the parts divide the stream; what a part has beyond the shortest part may be left out",
            resumed,
        )

    def values(self) -> dict[str, EventValue]:
        """The promise as the values of an event."""
        return dict(asdict(self))


@dataclass(slots=True)
class Ledger:
    """One peer's account. All numbers count from the beginning of the run."""

    held: int = 0
    """Samples that it holds now."""
    trained: int = 0
    sent: int = 0
    received: int = 0
    recovered: int = 0
    """Received from copies that other peers kept, after a change of the members."""
    read_again: int = 0
    """Samples that were read from the dataset because no member had a copy."""
    repeated: int = 0
    """Samples trained on once more, since the samples due had been lost on the way."""
    lost: list[int] = field(default_factory=list)
    """Samples of this peer's share of which no copy was left."""

    def values(self) -> dict[str, EventValue]:
        """The account as the values of a ``samples`` event."""
        return {
            "held": self.held,
            "trained": self.trained,
            "sent": self.sent,
            "received": self.received,
            "recovered": self.recovered,
            "read_again": self.read_again,
            "repeated": self.repeated,
            "lost": len(self.lost),
            "lost_samples": [*self.lost[:MOST_NAMED]],
        }
