"""The mean over a group of ranks, with rounded numbers in the messages.

Each rank owns a part. The others send it their rounded numbers of that part; it adds them up in full precision, in the order of the
ranks, rounds the mean and sends it to all. So all ranks end with identical bits, and the traffic is that of a ring all-reduce with
small numbers. Rounding errors are kept and added the next time (error feedback): by each rank to what it sends, and by the owner to
the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from zmqtrain.collectives.group import Group, bounds
from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.averaging.methods import copy_of, difference
from zmqtrain.exchange.checkpoint_part import require_like
from zmqtrain.net.endpoint import Tag
from zmqtrain.waiting import in_time, together
from zmqtrain.wire.compress import DenseCompressor
from zmqtrain.wire.payload import Payload


class RoundedMean:
    """Means of payloads; a number identifies successive payloads of one kind on all ranks."""

    def __init__(self, group: Group, codec: Literal["fp16", "int8"], arithmetic: Arithmetic) -> None:
        self._group, self._codec, self._arithmetic = group, DenseCompressor(codec), arithmetic
        self._lost: dict[str, Payload] = {}

    async def mean(self, index: int, payload: Payload, tag: Tag, *, priority: int = 0) -> None:
        """``payload`` becomes the mean over all ranks. Raises `PeerLostError` and `PeerTimeoutError`."""
        group = self._group
        if group.size == 1 or not payload.numel:
            return
        do, spans = self._arithmetic.do, bounds(payload.numel, group.size)
        others = [rank for rank in range(group.size) if rank != group.rank]
        inbox: dict[int, Payload] = {}

        def rounded_parts() -> list[Payload]:
            parts = [self._rounded(f"sent/{index}/{rank}", payload.part(*span)) for rank, span in enumerate(spans)]
            inbox[group.rank] = self._codec.decode(parts[group.rank])
            return parts

        def rounded_mean() -> Payload:
            mean = copy_of(inbox[0])
            for rank in range(1, group.size):
                mean.add_(inbox[rank])
            mean.scale_(1.0 / group.size)
            message = self._rounded(f"mean/{index}", mean)
            inbox.clear()
            inbox[group.rank] = self._codec.decode(message)
            return message

        def take() -> None:
            for rank, span in enumerate(spans):
                payload.part(*span).copy_(inbox[rank])

        parts = await do(rounded_parts, payload)
        await self._swap({rank: parts[rank] for rank in others}, inbox, (*tag, "part"), priority)
        message = await do(rounded_mean, payload)
        await self._swap(dict.fromkeys(others, message), inbox, (*tag, "mean"), priority)
        await do(take, payload)

    def state(self) -> Mapping[str, Payload]:
        """The rounding errors so far, for checkpoints."""
        return self._lost

    def restore(self, state: Mapping[str, Payload]) -> None:
        """Continue with what `state` returned."""
        self._lost.update(state)

    def require_like(self, payloads: Mapping[str, Payload]) -> None:
        """Raise `CheckpointError` unless the restored errors fit ``payloads``, which are given by their numbers."""
        group = self._group
        fits: dict[str, Payload] = {}
        for index, payload in payloads.items():
            spans = bounds(payload.numel, group.size)
            fits |= {f"sent/{index}/{rank}": payload.part(*span) for rank, span in enumerate(spans)}
            fits[f"mean/{index}"] = payload.part(*spans[group.rank])
        for name, lost in self._lost.items():
            if name not in fits:
                raise CheckpointError(f"the checkpoint has a rounding error {name!r:.60} that belongs to nothing in this run")
            require_like(name, lost, fits[name])

    def _rounded(self, name: str, payload: Payload) -> Payload:
        """The message for a payload, to which the previous rounding error is added."""
        whole = copy_of(payload)
        lost = self._lost.get(name)
        if lost is not None:
            whole.add_(lost)
        message = self._codec.encode(name, whole)
        self._lost[name] = difference(whole, self._codec.decode(message))
        return message

    async def _swap(self, outbox: Mapping[int, Payload], inbox: dict[int, Payload], tag: Tag, priority: int) -> None:
        group = self._group
        endpoint, whole = group.endpoint, group.tag(tag)

        async def receive(rank: int) -> None:
            received = await endpoint.receive(group.members[rank], whole)
            inbox[rank] = await self._arithmetic.do(lambda: copy_of(self._codec.decode(received)), received)

        sends = [endpoint.send(group.members[rank], whole, message, priority=priority) for rank, message in outbox.items()]

        def missing() -> str:
            return ", ".join(group.members[rank] for rank in outbox if rank not in inbox)

        async with in_time(missing, f"its part of {'/'.join(map(str, whole))}", group.timeout_s):
            await together(*sends, *(receive(rank) for rank in outbox))
