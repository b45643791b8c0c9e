"""The way of a bucket to the model servers and back, for one worker (`zmqtrain.exchange.model_server`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_gather, all_reduce, reduce_scatter
from zmqtrain.events import Recorder
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.base import Bucket, Replica
from zmqtrain.exchange.clip import GroupClip, square
from zmqtrain.exchange.pieces import Piece
from zmqtrain.exchange.push_compression import PushCompression
from zmqtrain.exchange.server_heads import Heads
from zmqtrain.exchange.server_messages import PushMeta, ReadMeta, parameters_tag, push_tag
from zmqtrain.exchange.server_settings import ModelServerSettings
from zmqtrain.exchange.team_parts import gather_parts
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.waiting import in_time, together
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload


@dataclass(frozen=True, slots=True)
class Turn:
    """Says for whom, and with whom, this worker trains a step."""

    group: Group
    """The workers of the group that train the step."""
    whole: bool
    """Whether these are all that the group began with."""
    life: int | None = None
    """How servers know them, if they may be lost."""
    torn: tuple[tuple[int, int], ...] = ()
    """The lives that were lost while they trained this batch, and their steps."""
    nothing: bool = False
    """Whether there is no batch for them."""


class Pushes:
    """Pushes this worker's pieces of gradients, and reads the parameters that answer them."""

    replica: Replica
    """Whose parameters they are. Set it before the first bucket goes."""

    def __init__(self, endpoint: Endpoint, settings: ModelServerSettings, heads: Heads, recorder: Recorder, judges: Group) -> None:
        """``judges``: the workers who decide together whether a gradient is finite, if they are to."""
        self._endpoint, self._settings, self._heads, self._recorder = endpoint, settings, heads, recorder
        self._judges = judges
        self.arithmetic = Arithmetic("zmqtrain-gradients")
        self.compression: PushCompression | None = None
        if settings.compression != "none":
            self.compression = PushCompression(settings.compression, settings.compression_ratio, settings.compression_rank)
        self.mine: dict[int, list[Piece]] = {}
        """The pieces of each bucket that this worker exchanges."""
        self.versions: dict[int, int] = {}
        """The version of each piece that was last read."""
        self.staleness: list[int] = []
        """Of the pushes since it was last emptied."""

    async def go(
        self,
        bucket: Bucket,
        step: int,
        changed: Mapping[str, Value] | None,
        clip: GroupClip | None,
        turn: Turn,
    ) -> None:
        """Exchange the bucket for ``step``.

        Args:
            changed: the optimizer's settings that have changed since the servers were configured.
            clip: what decides about the step's whole gradient, if anything does.
        """
        name, recorder, group = f"bucket {bucket.index}", self._recorder, bucket.sharers(turn.group)
        if group.size > 1 and not turn.nothing:
            add_up = reduce_scatter if turn.whole else all_reduce
            with recorder.span(f"{add_up.__name__} {name}", "send", step=step):
                await add_up(group, bucket.gradients, ("gradients", bucket.index, step), priority=bucket.index)
        passed_over = clip is not None and not await self._judge(clip, bucket, step, turn.group)
        mine = self.mine[bucket.index]
        with recorder.span(f"exchange {name}", "receive", step=step):
            if len(mine) == 1:
                await self._exchange_piece(bucket, mine[0], step, changed, passed_over, turn)
            else:
                await together(*(self._exchange_piece(bucket, piece, step, changed, passed_over, turn) for piece in mine))
        if group.size > 1:
            with recorder.span(f"all_gather {name}", "receive", step=step):
                tag = ("parameters", bucket.index, step)
                if turn.whole:
                    await all_gather(group, bucket.parameters, tag, priority=bucket.index)
                else:
                    size = len(self._settings.groups[self._settings.group])
                    await gather_parts(group, bucket.parameters, tag, size=size, priority=bucket.index)
        self.replica.parameters_ready(bucket)

    async def _exchange_piece(
        self,
        bucket: Bucket,
        piece: Piece,
        step: int,
        changed: Mapping[str, Value] | None,
        passed_over: bool,
        turn: Turn,
    ) -> None:
        """Push a gradient and read the parameters that answer it. The answer proves that the gradient has arrived, so its memory
        is free afterwards. ``passed_over``: no server may use it for an update."""
        version = self.versions[piece.index]
        meta = PushMeta(self._settings.group, version, changed, passed_over, turn.life, turn.torn, turn.nothing).to_value()
        gradient: Payload = ValuePayload() if turn.nothing else bucket.gradients.part(piece.start, piece.stop)
        gradient.meta = meta
        message = gradient
        if self.compression is not None and not passed_over and not turn.nothing:
            message = await self.compression.message(piece, gradient, self.arithmetic)
        self._recorder.audit("pushed", piece=piece.index, step=step, version=self.versions[piece.index])
        lasting = message is gradient  # it is not written before the answer, which means that the server has applied it
        into = bucket.parameters.part(piece.start, piece.stop)

        async def exchange(server: PeerId) -> Payload:
            tag = parameters_tag(piece.index, step + 1)
            async with self._heads.waits_for(server, tag):
                await self._endpoint.send(server, push_tag(piece.index, step), message, priority=bucket.index, lasting=lasting)
                async with in_time(server, f"the parameters of piece {piece.index} for step {step + 1}", self._settings.barrier_s):
                    return await self._endpoint.receive(server, tag, into=into)

        read = self.note(piece, await self._heads.ask(piece.server, exchange))
        self._recorder.audit("read", piece=piece.index, step=step + 1, version=read.version)
        self.staleness.append(read.staleness)

    def note(self, piece: Piece, received: Payload) -> ReadMeta:
        """The piece's parameters have been read."""
        read = ReadMeta.from_value(received.meta)
        self.versions[piece.index] = read.version
        return read

    async def _judge(self, clip: GroupClip, bucket: Bucket, step: int, group: Group) -> bool:
        """Wait until the gradients of all buckets have been added, then scale this worker's part of the bucket. Returns whether the
        whole gradient is finite."""
        own = [bucket.gradients.part(piece.start, piece.stop) for piece in self.mine[bucket.index]]
        if clip.add(await self.arithmetic.do(lambda: sum(map(square, own)), *own)):
            judges = self._settings.judges
            await all_reduce(self._judges if judges else group, clip.squares, ("norm", step))
            finite = clip.decide()
            if judges:
                self.replica.judged(finite, step)
        factor = await clip.factor
        if factor < 1.0:
            await self.arithmetic.do(partial(_clip, own, factor, nothing=clip.nothing), *own)
        return not clip.nothing


def _clip(parts: Sequence[Payload], factor: float, *, nothing: bool) -> None:
    """Scale the parts. ``nothing``: clear them, since values that are not finite would stay so when multiplied by 0."""
    for part in parts:
        if not nothing:
            part.scale_(factor)
        elif isinstance(part, TensorPayload):
            part.tensor.zero_()
