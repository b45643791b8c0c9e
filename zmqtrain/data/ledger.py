"""What has become of the samples that travel round the ring."""

from __future__ import annotations

from dataclasses import dataclass, field

from zmqtrain.events import EventValue

#: Lost samples that are named; the rest is counted.
MOST_NAMED = 100


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
    """Read from the dataset, since nobody had a copy."""
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
