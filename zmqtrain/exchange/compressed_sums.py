"""Sums of gradients that travel compressed, for networks that are slower than the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from zmqtrain.collectives.group import Group
from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.base import Bucket, Replica
from zmqtrain.exchange.checkpoint_part import kept_payload, kept_value
from zmqtrain.exchange.factor_mean import FactorMean
from zmqtrain.exchange.matrices import matrices_of
from zmqtrain.exchange.rounded_mean import RoundedMean
from zmqtrain.net.endpoint import Tag
from zmqtrain.wire.compress import make_codec
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.phantom import PhantomPayload


class Mean(Protocol):
    """A compressed mean over a group, with its state: `RoundedMean` or `FactorMean`."""

    async def mean(self, group: Group, index: int, payload: Payload, tag: Tag, *, priority: int = 0) -> None: ...

    def state(self, group: Group) -> Mapping[str, Payload]: ...

    def restore(self, group: Group, state: Mapping[str, Payload]) -> None: ...

    def require_like(self, group: Group, payloads: Mapping[str, Payload]) -> None: ...


class CompressedSums:
    """Implements `zmqtrain.exchange.sums.Sums` over the network. Every worker takes part for itself, also where several share a
    host.

    What compression loses is sent later (error feedback), so what is kept between steps belongs in checkpoints. All ranks get the
    same bits."""

    def __init__(self, group: Group, scale: float, compression: str, *, ratio: float = 0.01, rank: int = 4) -> None:
        """``scale``: the factor on the sums. ``ratio``: the share of elements that top-k sends; ``rank``: of PowerSGD's factors."""
        self.group, self._scale = group, scale
        self._compression, self._ratio, self._rank = compression, ratio, rank
        self._arithmetic = Arithmetic("zmqtrain-sums")
        self._mean: Mean | None = None
        self._restored: dict[str, Payload] = {}

    async def start(self, replica: Replica) -> None:
        if self._compression == "powersgd":
            matrices = {bucket.index: matrices_of(bucket) for bucket in replica.buckets}
            self._mean = FactorMean(self._rank, matrices, self._arithmetic)
        else:
            self._mean = RoundedMean(make_codec(self._compression, self._ratio), self._arithmetic)
        self._mean.restore(self.group, self._restored)
        self._mean.require_like(self.group, {str(bucket.index): _work_like(bucket.gradients) for bucket in replica.buckets})
        self._restored = {}

    async def sum(self, bucket: Bucket, tag: Tag) -> None:
        assert self._mean is not None, "start() comes first"
        gradients = bucket.gradients
        dtype = _work_type(gradients.dtype)
        work = gradients
        if dtype != gradients.dtype:  # two bytes are too few for what is kept and added up
            work = await self._arithmetic.do(
                lambda: gradients.mapped(dtype, gradients.numel, lambda flat: flat.float(), None), gradients
            )
        await self._mean.mean(self.group, bucket.index, work, tag, priority=bucket.index)
        await self._arithmetic.do(lambda: self._finish(gradients, work), gradients)

    def _finish(self, gradients: Payload, work: Payload) -> None:
        factor = self._scale * self.group.size
        if factor != 1.0:
            work.scale_(factor)
        if work is not gradients:
            gradients.copy_(work)

    def abort(self, error: BaseException) -> None:
        return None

    async def stop(self) -> None:
        self._arithmetic.close()

    def state_dict(self) -> dict[str, Value]:
        """What compression has not sent yet, and what it needs beside that."""
        kept = {} if self._mean is None else self._mean.state(self.group)
        return {name: kept_value(payload) for name, payload in kept.items()}

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        """Call it before `start`."""
        self._restored = {name: kept_payload(f"unsent gradient {name:.40}", value) for name, value in state.items()}


def refuse_unsent(state: Mapping[str, Value]) -> None:
    """Raise `CheckpointError` if a run without compression resumes from a checkpoint that has ``state``."""
    if state:
        raise CheckpointError(
            "the checkpoint has gradients that compression has not sent yet: resume with the [exchange] compression with which it "
            "was written"
        )


def _work_type(dtype: str) -> str:
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def _work_like(gradients: Payload) -> Payload:
    return PhantomPayload(gradients.numel, _work_type(gradients.dtype))
