"""How large the buckets are in which parameters travel."""

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


@dataclass(frozen=True, slots=True)
class BucketLimit:
    """The size of the largest bucket, in bytes."""

    most: int = USUAL_BYTES
    buckets: int = 1
    """Into how many buckets a small model is divided."""

    @classmethod
    def of(cls, topology: Topology) -> BucketLimit:
        """That of ``[compute] bucket_size``, or if the file does not give it, what suits the job's exchange.

        Only all-reduce gets smaller ones. A model server holds whole buckets of a small model: the more of them there are, the more
        uneven are the servers' loads. Gossip among eight peers of a slow network takes up to half as long again with them, where it
        gains less elsewhere (docs/performance.md).
        """
        given = topology.compute.bucket_size
        if given is not None:
            return cls(given)
        crosses = len(topology.hosts) > 1 and topology.exchange.kind == "allreduce"
        return cls(buckets=BUCKETS) if crosses else cls()

    def bytes_of(self, model_bytes: float) -> int:
        """For a model of ``model_bytes``."""
        return self.most if self.buckets == 1 else int(min(self.most, max(LEAST_BYTES, model_bytes / self.buckets)))
