"""The mean over a group of ranks, with rounded numbers (or few of them, or their signs) in the messages.

Each rank owns a part. The others send it their rounded numbers of that part; it adds them up in full precision, in the order of the
ranks, rounds the mean and sends it to all. So all ranks end with identical bits, and the traffic is that of a ring all-reduce with
small numbers. Rounding errors are kept and added the next time (error feedback): by each rank to what it sends, and by the owner to
the mean (Tang et al. 2019, DoubleSqueeze).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

from zmqtrain.collectives.group import Group, bounds
from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.averaging.methods import copy_of
from zmqtrain.exchange.checkpoint_part import require_like
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.waiting import in_time, together
from zmqtrain.wire.compress import Codec, decompress, encode, kept_of
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload

#: The ranks of the last mean of a payload, if there was one, and its rounding errors by name.
Kept: TypeAlias = tuple[tuple[PeerId, ...] | None, Mapping[str, Payload]]


class RoundedMean:
    """Means of payloads; a number identifies successive payloads of one kind on all ranks.

    If the ranks become others, the payloads are divided in another way, and the errors of the previous mean are dropped, on all
    ranks alike."""

    def __init__(self, codec: Codec, arithmetic: Arithmetic) -> None:
        """``codec``: of what each rank sends, and of means (`Codec.of_mean`)."""
        self._codec, self._arithmetic = codec, arithmetic
        self._lost: dict[str, Payload] = {}
        self._of: dict[int, tuple[PeerId, ...]] = {}  # the ranks to which the errors of each payload belong

    async def mean(self, group: Group, index: int, payload: Payload, tag: Tag, *, priority: int = 0) -> None:
        """``payload`` becomes the mean over all ranks. Raises `PeerLostError` and `PeerTimeoutError`: then call `take_back` before
        another attempt."""
        if self._of.get(index) != group.members:
            self._drop(index)
            self._of[index] = group.members
        if group.size == 1 or not payload.numel:
            return
        do, spans = self._arithmetic.do, bounds(payload.numel, group.size)
        codec, of_mean = self._codec, self._codec.of_mean(group.size)
        others = [rank for rank in range(group.size) if rank != group.rank]
        inbox: dict[int, Payload] = {}

        def rounded_parts() -> list[Payload]:
            parts = [self._rounded(f"sent/{index}/{rank}", payload.part(*span), codec) for rank, span in enumerate(spans)]
            inbox[group.rank] = decompress(parts[group.rank], codec.name)
            return parts

        def rounded_mean() -> Payload:
            mean = copy_of(inbox[0])
            for rank in range(1, group.size):
                mean.add_(inbox[rank])
            mean.scale_(1.0 / group.size)
            message = self._rounded(f"mean/{index}", mean, of_mean)
            inbox.clear()
            inbox[group.rank] = decompress(message, of_mean.name)
            return message

        def take() -> None:
            for rank, span in enumerate(spans):
                payload.part(*span).copy_(inbox[rank])

        parts = await do(rounded_parts, payload)
        await self._swap(group, {rank: parts[rank] for rank in others}, inbox, (*tag, "part"), priority, codec)
        message = await do(rounded_mean, payload)
        await self._swap(group, dict.fromkeys(others, message), inbox, (*tag, "mean"), priority, of_mean)
        await do(take, payload)

    def state(self, group: Group) -> Mapping[str, Payload]:
        """The rounding errors of means over ``group`` so far, for checkpoints."""
        return {name: lost for name, lost in self._lost.items() if self._of.get(_index_in(name)) == group.members}

    def restore(self, group: Group, state: Mapping[str, Payload]) -> None:
        """Continue with what `state` returned."""
        self._lost.update(state)
        self._of.update({_index_in(name): group.members for name in state})

    def kept(self, index: int) -> Kept:
        """The rounding errors of one payload, for `take_back`."""
        errors = {name: lost for name, lost in self._lost.items() if _index_in(name) == index}
        return self._of.get(index), errors

    def take_back(self, index: int, kept: Kept) -> None:
        """The means of this payload since ``kept`` do not count."""
        members, errors = kept
        self._drop(index)
        self._lost.update(errors)
        if members is not None:
            self._of[index] = members

    def require_like(self, group: Group, payloads: Mapping[str, Payload]) -> None:
        """Raise `CheckpointError` unless the restored errors fit ``payloads``, which are given by their numbers."""
        fits: dict[str, Payload] = {}
        for index, payload in payloads.items():
            spans = bounds(payload.numel, group.size)
            fits |= {f"sent/{index}/{rank}": payload.part(*span) for rank, span in enumerate(spans)}
            fits[f"mean/{index}"] = payload.part(*spans[group.rank])
        for name, lost in self._lost.items():
            if name not in fits:
                raise CheckpointError(f"the checkpoint has a rounding error {name!r:.60} that belongs to nothing in this run")
            require_like(name, lost, fits[name])

    def _drop(self, index: int) -> None:
        self._lost = {name: lost for name, lost in self._lost.items() if _index_in(name) != index}
        self._of.pop(index, None)

    def _rounded(self, name: str, payload: Payload, codec: Codec) -> Payload:
        """The message for a payload, to which the previous rounding error is added."""
        whole = copy_of(payload)
        lost = self._lost.get(name)
        if lost is not None:
            whole.add_(lost)
        message = encode(codec, whole)
        sent = decompress(message, codec.name)
        self._lost[name] = whole.mapped(whole.dtype, whole.numel, lambda flat: kept_of(flat, tensor_of(sent)), None)
        return message

    async def _swap(
        self, group: Group, outbox: Mapping[int, Payload], inbox: dict[int, Payload], tag: Tag, priority: int, codec: Codec
    ) -> None:
        endpoint, whole = group.endpoint, group.tag(tag)

        async def receive(rank: int) -> None:
            received = await endpoint.receive(group.members[rank], whole)
            inbox[rank] = await self._arithmetic.do(lambda: copy_of(decompress(received, codec.name)), received)

        sends = [endpoint.send(group.members[rank], whole, message, priority=priority) for rank, message in outbox.items()]

        def missing() -> str:
            return ", ".join(group.members[rank] for rank in outbox if rank not in inbox)

        async with in_time(missing, f"its part of {'/'.join(map(str, whole))}", group.timeout_s):
            await together(*sends, *(receive(rank) for rank in outbox))


def tensor_of(payload: Payload) -> Tensor:
    """The flat tensor of a payload that has one."""
    assert isinstance(payload, TensorPayload)
    return payload.tensor.view(-1)


def _index_in(name: str) -> int:
    """The number of the payload to which an error with this name belongs; -1 for a name that is none."""
    _, _, rest = name.partition("/")
    index = rest.partition("/")[0]
    return int(index) if index.isdecimal() else -1
