"""What becomes of samples: what each kind of source promises, and an account of those that travel round the ring."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from zmqtrain.data.partition import Partition
from zmqtrain.data.source import Source
from zmqtrain.events import EventValue

#: Lost samples that are named; the rest is counted.
MOST_NAMED = 100


@dataclass(frozen=True, slots=True)
class Promise:
    """What a run can say of its samples before it begins. It stands in the summary."""

    source: str
    """dataset, ring, stream or parts of a stream."""
    order: str
    """Where the order of an epoch comes from."""
    each: str
    """How often a sample is trained on in an epoch."""
    resumed: str
    """Which samples a resumed run trains on."""

    @classmethod
    def of_dataset(cls, source: Source, partition: Partition) -> Promise:
        """The promise for a map-style dataset."""
        left = partition.samples % partition.step_samples
        rest = f"; {left} of {partition.samples}, which fill no step, are left out" if left else ""
        if source.order == "sampler":
            order, each = "the sampler's, seeded by the job", f"as often as the sampler gives it{rest}"
        else:
            order = "the dataset's" if partition.shuffle == "none" else "another each epoch, from the job's seed"
            each = f"once{rest}"
        return cls("dataset", order, each, "what the uninterrupted run would, augmented by the same random numbers")

    @classmethod
    def of_ring(cls, *, survives: bool) -> Promise:
        """The promise for a ring. ``survives``: the run continues without lost members."""
        each = "once while nobody is lost; the ledger says what became of the others" if survives else "once"
        return cls("ring", "each group's part, which moves on to the next group", each, "the same order")

    @classmethod
    def of_stream(cls, source: Source) -> Promise:
        """The promise for a stream, whose length is not known."""
        stateful = hasattr(source.dataset, "state_dict") and hasattr(source.dataset, "load_state_dict")
        resumed = "what follows on the stream's own state" if stateful else "what follows on all that is read again and passed over"
        if source.shard is None:
            return cls("stream", "the stream's", "once; what fills no step at the end is left out", resumed)
        return cls(
            "parts of a stream",
            "each part's",
            "as the parts divide the stream; what one part has more than the shortest may be left out",
            resumed,
        )

    def values(self) -> dict[str, EventValue]:
        """As the values of an event."""
        return dict(asdict(self))


@dataclass(slots=True)
class Ledger:
    """One peer's account. All numbers since the beginning."""

    held: int = 0
    """Samples that it holds now."""
    trained: int = 0
    sent: int = 0
    received: int = 0
    recovered: int = 0
    """Got from copies that others kept, after a change of the members."""
    read_again: int = 0
    """Samples that were read from the dataset because no member had a copy."""
    repeated: int = 0
    """Trained once more, since those that were due had been lost on the way."""
    lost: list[int] = field(default_factory=list)
    """Samples of this peer's share of which there was no copy any more."""

    def values(self) -> dict[str, EventValue]:
        """As the values of a ``samples`` event."""
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
