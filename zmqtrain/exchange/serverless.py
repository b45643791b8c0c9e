"""The common base of exchanges without servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zmqtrain.collectives.group import Group
from zmqtrain.exchange.base import Bucket, Replica
from zmqtrain.exchange.sums import Sums
from zmqtrain.wire.payload import Payload, Value


class Serverless:
    """The members of `zmqtrain.exchange.base.Exchange` that do nothing if there are no servers."""

    def __init__(self, sums: Sums) -> None:
        """``sums``: the sums of gradients, which are told when the exchange breaks."""
        self._sums = sums
        self._replica: Replica | None = None
        """Set by ``start``."""

    def exchanges(self, step: int) -> bool:
        return True

    def repeats(self, step: int) -> bool:
        return False

    async def sit_out(self, step: int) -> None:
        raise AssertionError("all groups have a batch at each step")

    async def keep(self, step: int, *, last: bool, in_turn: bool = True) -> None:
        return None

    async def read(self, label: str, *, kept: int | None = None, last: bool = False) -> None:
        return None

    def center(self, bucket: Bucket) -> Payload:
        raise AssertionError("only elastic averaging has a center")

    def weight(self, group: Group) -> float | None:
        return None

    async def require_alike(self, group: Group, tag: str) -> None:
        return None

    async def leave(self) -> None:
        return None

    def staleness(self) -> Sequence[int]:
        return ()

    def state_dict(self) -> dict[str, Value]:
        return {}

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        return None

    def _abort(self, error: BaseException) -> None:
        self._sums.abort(error)
        if self._replica is not None:
            self._replica.abort(error)

    def _replica_started(self) -> Replica:
        assert self._replica is not None, "start() comes first"
        return self._replica
