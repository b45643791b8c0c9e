"""How far apart two models are, bucket by bucket."""

from __future__ import annotations

import math

from zmqtrain.exchange.clip import squares_of
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload


class Distance:
    """Relative Euclidean distance of two models: |a - b| / |a|."""

    def __init__(self, buckets: int) -> None:
        self._missing = buckets
        self._difference = self._norm = 0.0

    def add(self, own: Payload, other: Payload, *, last: bool = True) -> bool:
        """Add a bucket, or a slice of one (``last``: its last slice). Returns whether all buckets have been added; never true for
        payloads without elements in memory."""
        if not isinstance(own, TensorPayload) or not isinstance(other, TensorPayload):
            return False
        self._difference += squares_of(own.tensor - other.tensor)
        self._norm += squares_of(own.tensor)
        self._missing -= last
        return self._missing == 0

    def relative(self) -> float:
        """The distance over all buckets that were added."""
        return math.sqrt(self._difference / self._norm) if self._norm else 0.0
