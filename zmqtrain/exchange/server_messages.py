"""The messages between workers and model servers, as data.

====================  =======================  =============================================  ==============================
message               from, to                 tag (or method)                                carries
====================  =======================  =============================================  ==============================
configure (request)   worker 0 to servers      ``configure``                                  `Configuration`
initial               group 0 to servers       ``("initial", piece)``                         a piece's first values
initial               server to workers        ``("initial", piece)``                         the first values, for all workers
resumed               group 0 to servers       ``("resumed", piece)``                         values and state of a checkpoint
push                  worker to server         ``("push", piece, step)``                      gradient, `PushMeta`
parameters            server to worker         ``("parameters", piece, step)``                values for ``step``, `ReadMeta`
refused (request)     server to worker         ``refused``                                    why a push was refused
left (request)        worker to servers        ``left``                                       this worker trains no more
show (request)        worker 0 to servers      ``show``                                       a label, for its group to read
checkpoint (request)  worker 0 to servers      ``checkpoint``                                 the step of the checkpoint
shown                 server to that group     ``("shown", piece, label)``                    values, `ReadMeta`
finished (request)    worker to servers        ``finished``                                   this worker needs no server
order                 server 0 to servers      ``("order",)``                                 snapshots: what comes next
norm                  server to servers        ``("norm", number)``                           clipping: sum of squares
moved (request)       server to worker         ``moved``                                      a shard is on another server now
members (request)     worker to servers        ``members``                                    elastic: who is there, how far others
change (request)      worker to servers        ``change``                                     elastic: a step, and its members
history (request)     worker to server 0       ``history``                                    elastic: all changes so far
entered               server to worker         ``("entered", piece, incarnation)``            values for a worker's first step
====================  =======================  =============================================  ==============================

Servers hold no user code: everything they need is in the `Configuration`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, cast

from zmqtrain.errors import ProtocolError
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.pieces import BucketSize, Piece, pieces
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.wire.dtypes import dtype_named
from zmqtrain.wire.payload import Value

PolicyKind = Literal["sync", "async", "bound"]


@dataclass(frozen=True, slots=True)
class BucketDescription:
    """A bucket as servers see it."""

    numel: int
    dtype: str
    parameter_group: int
    positions: tuple[int, ...] | None = None
    """The positions in each group of the workers that have it; ``None``: all workers."""
    starts: tuple[int, ...] = ()
    """Where each parameter begins, if gradients mark unreached parameters (`zmqtrain.collectives.unreached`)."""

    def starts_in(self, piece: Piece) -> tuple[int, ...]:
        """Where parameters, or the rest of one, begin in a piece of the bucket."""
        within = [start - piece.start for start in self.starts if piece.start < start < piece.stop]
        return (0, *within) if self.starts else ()

    @property
    def size(self) -> BucketSize:
        return BucketSize(self.numel, dtype_named(self.dtype).itemsize, self.positions)

    @property
    def first(self) -> int:
        """The position of the worker that gives its initial values."""
        return self.positions[0] if self.positions else 0

    def to_value(self) -> Value:
        """The description as a short list: a model may have a thousand buckets, and headers are limited."""
        return [self.numel, self.dtype, self.parameter_group, list(self.positions or ()), list(self.starts)]

    @classmethod
    def from_value(cls, row: Sequence[Any]) -> BucketDescription:
        numel, dtype, parameter_group, positions, starts = row
        starts = tuple(starts)
        if any(type(start) is not int for start in starts) or not all(a < b for a, b in pairwise((-1, *starts, numel))):
            raise ValueError("a bucket's parameters are not in ascending order")
        return cls(numel, dtype, parameter_group, tuple(positions) or None, starts)


def divided(
    buckets: Sequence[BucketDescription], group_size: int, servers: int, split_bytes: int, least_bytes: int | None
) -> tuple[Piece, ...]:
    """The buckets divided into pieces (`zmqtrain.exchange.pieces`)."""
    return pieces([bucket.size for bucket in buckets], group_size, servers, split_bytes, least_bytes)


@dataclass(frozen=True, slots=True)
class Configuration:
    """The model and the rules of its exchange, from which its division into pieces follows."""

    buckets: tuple[BucketDescription, ...]
    optimizer: OptimizerSpec
    groups: tuple[tuple[PeerId, ...], ...]
    """The workers of each group, by position."""
    servers: tuple[PeerId, ...]
    split_bytes: int
    policy: PolicyKind
    least_bytes: int | None = None
    """With ``split_bytes``, the sizes of pieces (`zmqtrain.exchange.pieces`)."""
    bound: int = 0
    snapshot: bool = False
    clip_norm: float = 0.0
    """Servers clip the averaged gradient to this norm (sync only; otherwise groups clip); 0: they do not."""
    restored: bool = False
    """Servers take their values from the checkpoint that the run resumes, not from worker 0."""
    horizon: float = 0.0
    """The number of updates that the parameters look ahead (`zmqtrain.exchange.look_ahead`)."""
    rises: tuple[float, ...] = ()
    """The number of updates over which the learning rate of each parameter group rises at the beginning, if any does."""
    ceilings: tuple[float, ...] = ()
    """By how much the fitted rate of each parameter group may be multiplied (`zmqtrain.exchange.rate_recovery`), if any."""
    limits: bool = False
    """Whether servers limit how fast gradients grow (`zmqtrain.exchange.norm_limit`)."""
    resumed: int | None = None
    """Workers of group 0 give servers their values and their optimizers' states as they were at this step, in place of the initial
    values: the run resumes a checkpoint whose pieces were others."""
    phantom: bool = False
    """Only sizes are sent (`zmqtrain.wire.phantom`): servers hold no values and compute nothing."""
    elastic: Value = None
    """If workers may be lost: which processes the run begins with, and with which data
    (`zmqtrain.exchange.server_changes.base_value`)."""
    whole_groups: bool = False
    """If workers may be lost: no worker of a group can train without the others. They come and go together."""

    @property
    def keeps_places(self) -> bool:
        """Whether others wait for a group that has lost a worker, until its others have trained its step again."""
        return self.elastic is not None and self.policy == "sync" and max(map(len, self.groups)) > 1 and not self.whole_groups

    def positions(self, piece: Piece) -> Sequence[int]:
        """The positions in each group of the workers that have a piece's part of the model."""
        positions = self.buckets[piece.bucket].positions
        return range(len(self.groups[0])) if positions is None else positions

    def pieces(self) -> tuple[Piece, ...]:
        """The model divided into pieces."""
        return divided(self.buckets, len(self.groups[0]), len(self.servers), self.split_bytes, self.least_bytes)

    def to_value(self) -> Value:
        """The configuration as plain values, which `from_value` reads."""
        values = asdict(self)
        values["buckets"] = [bucket.to_value() for bucket in self.buckets]
        values["groups"] = [list(members) for members in self.groups]
        values["servers"] = list(self.servers)
        values["optimizer"] = {"name": self.optimizer.name, "groups": [dict(group) for group in self.optimizer.groups]}
        return cast(Value, values)

    @classmethod
    def from_value(cls, value: Value) -> Configuration:
        """Raises `ProtocolError` if ``value`` is not a result of `to_value`."""
        try:
            values: dict[str, Any] = dict(cast(Mapping[str, Any], value))
            values["buckets"] = tuple(BucketDescription.from_value(row) for row in values["buckets"])
            values["groups"] = tuple(tuple(members) for members in values["groups"])
            values["servers"] = tuple(values["servers"])
            values["rises"] = tuple(float(rise) for rise in values["rises"])
            values["ceilings"] = tuple(float(ceiling) for ceiling in values["ceilings"])
            optimizer = values["optimizer"]
            values["optimizer"] = OptimizerSpec(optimizer["name"], tuple(optimizer["groups"]))
            configuration = cls(**values)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ProtocolError(f"a model server got an invalid configuration: {error}") from None
        for what, each in (("rises", configuration.rises), ("ceilings", configuration.ceilings)):
            if each and len(each) != len(configuration.optimizer.groups):
                raise ProtocolError(
                    f"the configuration has {len(each)} {what} for {len(configuration.optimizer.groups)} learning rates"
                )
        if not configuration.buckets or not configuration.groups or configuration.policy not in ("sync", "async", "bound"):
            raise ProtocolError(
                f"a model server cannot work with {len(configuration.buckets)} buckets, "
                f"{len(configuration.groups)} groups and staleness {configuration.policy!r}"
            )
        return configuration


@dataclass(frozen=True, slots=True)
class PushMeta:
    """The header of a pushed gradient."""

    group: int
    version: int
    """The version of the piece with which the gradient was computed."""
    hyperparameters: Mapping[str, Value] | None = None
    """Hyperparameters of the optimizer that differ from the configuration at this step, if any."""
    passed_over: bool = False
    """Skip the update because the gradient was not finite. It counts as an update that changes nothing."""
    life: int | None = None
    """If workers may be lost: which of the worker's processes pushes (its incarnation)."""
    torn: tuple[tuple[int, int], ...] = ()
    """The lives that were lost while they trained this batch, and their steps (`zmqtrain.data.slots.Slot`)."""
    nothing: bool = False
    """The group has no batch in this step, which others have (if workers may be lost). There is no gradient, and none counts."""

    def to_value(self) -> Value:
        head: list[Value] = [self.group, self.version]
        if self.life is not None:
            torn: list[Value] = [[life, step] for life, step in self.torn]
            tail: list[Value] = [True] if self.nothing else []
            return [*head, dict(self.hyperparameters or {}), self.passed_over, self.life, torn, *tail]
        if self.passed_over:
            return [*head, dict(self.hyperparameters or {}), True]
        return [*head, dict(self.hyperparameters)] if self.hyperparameters else head

    @classmethod
    def from_value(cls, value: Value) -> PushMeta:
        """Raises `ProtocolError` if ``value`` is not a result of `to_value`."""
        match value:
            case [int(group), int(version)]:
                return cls(group, version)
            case [int(group), int(version), dict(hyperparameters)]:
                return cls(group, version, hyperparameters)
            case [int(group), int(version), dict(hyperparameters), True]:
                return cls(group, version, hyperparameters, True)
            case [int(group), int(version), dict(hyperparameters), bool(passed_over), int(life), [*torn]]:
                return cls(group, version, hyperparameters or None, passed_over, life, tuple(map(_life_of, torn)))
            case [int(group), int(version), dict(hyperparameters), bool(passed_over), int(life), [*torn], True]:
                lives = tuple(map(_life_of, torn))
                return cls(group, version, hyperparameters or None, passed_over, life, lives, nothing=True)
        raise ProtocolError(f"the header of a push is {value!r:.100}; it must have group, version and hyperparameters")


@dataclass(frozen=True, slots=True)
class ReadMeta:
    """The header of published parameters."""

    version: int
    """The number of updates that the values contain."""
    staleness: int
    """Updates by others between the read and the write of the push that is answered."""

    def to_value(self) -> Value:
        return [self.version, self.staleness]

    @classmethod
    def from_value(cls, value: Value) -> ReadMeta:
        """Raises `ProtocolError` if ``value`` is not a result of `to_value`."""
        match value:
            case [int(version), int(staleness)]:
                return cls(version, staleness)
        raise ProtocolError(f"the header of parameters is {value!r:.100}; it must have version and staleness")


def _life_of(row: object) -> tuple[int, int]:
    match row:
        case [int(life), int(step)]:
            return life, step
    raise ProtocolError(f"the header of a push names {row!r:.60} as a lost process; it must have an incarnation and a step")


#: The method by which a worker learns that a server will not answer what it has sent, since another one has the shard.
MOVED = "moved"
#: The topic of the parameters with which a worker begins that comes late.
ENTERED = "entered"


def entered_tag(piece: int, incarnation: int) -> Tag:
    return (ENTERED, piece, incarnation)


def moved_value(version: int) -> Value:
    """The answer to a request about a shard that another server has since the view of this version."""
    return {MOVED: version}


def moved_version(answer: Value) -> int | None:
    """The version in such an answer; ``None``: it is another one."""
    match answer:
        case {"moved": int(version)}:
            return version
    return None


def initial_tag(piece: int) -> Tag:
    return ("initial", piece)


def resumed_tag(piece: int) -> Tag:
    return ("resumed", piece)


def push_tag(piece: int, step: int) -> Tag:
    return ("push", piece, step)


def parse_push_tag(tag: Tag) -> tuple[int, int]:
    """Piece and step of the tag. Raises `ProtocolError` if it is not one of a push."""
    match tag:
        case ("push", int(piece), int(step)):
            return piece, step
    raise ProtocolError(f"{tag!r} is not a tag of a push, such as ('push', piece, step)")


def parameters_tag(piece: int, step: int) -> Tag:
    return ("parameters", piece, step)


def shown_tag(piece: int, label: str) -> Tag:
    return ("shown", piece, label)


def kept_label(step: int) -> str:
    """The label under which servers provide what they keep for the checkpoint at ``step``."""
    return f"checkpoint {step}"


def norm_tag(number: int) -> Tag:
    return ("norm", number)


def differing(now: OptimizerSpec, base: OptimizerSpec) -> Sequence[Mapping[str, Value] | None]:
    """For each parameter group, the hyperparameters that a schedule has changed since ``base``; None if there are none. Values that
    a schedule has added for itself are not hyperparameters."""
    return [
        {key: value for key, value in group.items() if key in first and first[key] != value} or None
        for group, first in zip(now.groups, base.groups, strict=True)
    ]
