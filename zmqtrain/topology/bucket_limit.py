"""How large the buckets are in which parameters travel, and the pieces of them that model servers have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zmqtrain.topology.schema import Topology

#: Bytes of a bucket where nothing says otherwise. A model of several such buckets travels while backward still runs.
USUAL_BYTES = 4 << 20
#: A model that is smaller travels in about so many buckets where it crosses a network, none of them smaller than that: one bucket
#: would leave only when backward has ended. Within a host, sums take less time than what each bucket costs beside them.
BUCKETS, LEAST_BYTES = 4, 128 << 10
#: A smaller message takes hardly less time, even at 100 Mbit/s.
LEAST_PIECE_BYTES = 8 << 10


@dataclass(frozen=True, slots=True)
class BucketLimit:
    """The size of the largest bucket, in bytes."""

    most: int = USUAL_BYTES
    buckets: int = 1
    """Into how many buckets a small model is divided."""

    @classmethod
    def of(cls, topology: Topology) -> BucketLimit:
        """That of ``[compute] bucket_size``, or if the file does not give it, what suits the job's exchange.

        Averaging gets no smaller ones: what it exchanges is ready all at once.
        """
        given = topology.compute.bucket_size
        if given is not None:
            return cls(given)
        small = topology.exchange.kind != "averaging" and len(topology.hosts) > 1
        return cls(buckets=BUCKETS) if small else cls()

    def divides(self, model_bytes: float) -> bool:
        """Whether a model of ``model_bytes`` has smaller buckets than a large one."""
        return self.bytes_of(model_bytes) < self.most

    def bytes_of(self, model_bytes: float) -> int:
        """The largest size of a bucket, in bytes, for a model of ``model_bytes``."""
        return self.most if self.buckets == 1 else int(min(self.most, max(LEAST_BYTES, model_bytes / self.buckets)))


@dataclass(frozen=True, slots=True)
class PieceLimit:
    """The size of the largest piece of a bucket that a worker exchanges with one model server in one message."""

    most: int = USUAL_BYTES
    spread: bool = False
    """Whether a bucket is divided evenly among all servers. Otherwise one that is no larger than ``most`` goes to a single server,
    to which all workers send at once while the other servers' NICs have nothing to do."""

    @classmethod
    def of(cls, topology: Topology) -> PieceLimit:
        """That of the job. Within a host a message costs more than what even loads gain; and what PowerSGD sends of a matrix grows
        with the pieces of it."""
        exchange = topology.exchange
        return cls(exchange.split_bytes, spread=len(topology.hosts) > 1 and exchange.compression != "powersgd")

    def of_model(self, model_bytes: float) -> tuple[int, int]:
        """For a model of ``model_bytes``: the size of the largest piece, and that of the smallest into which a bucket is divided
        only so that more servers have one of it."""
        if not self.spread:
            return self.most, self.most
        return min(self.most, BucketLimit(buckets=BUCKETS).bytes_of(model_bytes)), min(self.most, LEAST_PIECE_BYTES)
