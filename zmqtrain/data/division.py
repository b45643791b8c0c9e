"""How workers that train every step together divide its samples, if some may be lost and others may join. Pure.

The samples are one endless *sequence*: those of step 0 of all groups, then those of step 1, and so on. Each step takes the next of
them, divided evenly among all who train it. When the members change, a new *era* begins at a step that all of them know. Then what
the lost ones had not contributed comes first, and after it the sequence goes on where it was. So each sample is trained once,
whoever was lost, and an epoch has all its samples::

    era 0: 3 members, 6 samples a step    step 0: 0..1 2..3 4..5    step 1: 6..7 8..9 - -    the last one is lost in step 1
    era 1: 2 members                      step 2: 10 11 12 | 13 14 15    step 3: 16 17 18 | 19 20 21    ...

Either the batch of a step stays, so that shares grow when members are lost; or shares stay, so that the batch shrinks (``usual``).

A *life* is one process under a worker's name (`zmqtrain.data.slots`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from zmqtrain.data.partition import even_bounds
from zmqtrain.data.slots import Life
from zmqtrain.errors import ProtocolError
from zmqtrain.wire.payload import Value

#: Positions in the sequence: first and last (exclusive).
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Era:
    """The steps between two changes of the members."""

    since: int
    """Its first step."""
    members: tuple[Life, ...]
    """Those who divide its samples, in this order."""
    first: int
    """The first sample that nobody has taken before, except for those that are ``left``."""
    left: tuple[Span, ...] = ()
    """Samples that others have left; they come first."""

    def cut(self, start: int, stop: int) -> tuple[Span, ...]:
        """The samples from ``start`` up to ``stop``, counted from the first of this era."""
        return cut_of((*self.left, (self.first, self.first + max(0, stop))), start, stop)


class Division:
    """The eras of a run. Every worker has the same, or the part of them since it has joined."""

    def __init__(
        self,
        members: Sequence[Life],
        batch: int,
        *,
        since: int = 0,
        first: int | None = None,
        left: Sequence[Span] = (),
        usual: int | None = None,
    ) -> None:
        """``members``: those who train step ``since``. ``batch``: the samples of a step; if ``usual`` is given, of one that so many
        members divide, and others take in proportion. ``first`` and ``left``: where the sequence goes on at ``since``, if that is
        not what follows from the step."""
        self.batch, self._usual = batch, usual
        self.eras = [Era(since, tuple(members), since * batch if first is None else first, tuple(left))]
        self.total: int | None = None
        """The number of samples after which training ends, if that is known."""
        self.steps: int | None = None
        """The number of steps after which training ends, if that is known."""
        self._gone: dict[Life, int] = {}  # lost -> the first step whose samples it has left

    @classmethod
    def from_value(cls, value: Sequence[Value], batch: int, usual: int | None = None) -> Division:
        """What `to_value` of another worker has returned; ``batch`` and ``usual`` as there. Raises `ProtocolError`."""
        eras = []
        for each in value:
            match each:
                case [int(since), [*members], int(first), [*left]] if all(map(_is_life, members)):
                    lives: Any = members
                    eras.append(Era(since, tuple((peer, process) for peer, process in lives), first, spans_of(left, ProtocolError)))
                case _:
                    raise ProtocolError(f"{each!r:.100} does not say how samples are divided")
        if not eras:
            raise ProtocolError("a division of samples needs at least one era")
        division = cls(eras[0].members, batch, usual=usual)
        division.eras = eras
        return division

    def to_value(self, step: int) -> list[Value]:
        """This division from ``step`` on."""
        left, first = self.rest(step)
        now = self.at(step)
        eras = [Era(step, now.members, first, left), *(era for era in self.eras if era.since > step)]
        return [[era.since, [list(life) for life in era.members], era.first, [list(span) for span in era.left]] for era in eras]

    def at(self, step: int) -> Era:
        """The era of ``step``."""
        return next((era for era in reversed(self.eras) if era.since <= step), self.eras[0])

    def spans(self, step: int, life: Life) -> tuple[Span, ...]:
        """The samples that this life takes at ``step``; none if it has no part in it."""
        era = self.at(step)
        if life not in era.members:
            return ()
        start, _ = self._bounds(era, step)
        first, last = self._part(era, step, life)
        return era.cut(start + first, start + last)

    def samples(self, step: int, lives: Iterable[Life]) -> int:
        """The number of samples that these lives take at ``step``: also before the first era, if nobody was lost then."""
        era = self.at(step)
        parts = (self._part(era, step, life) for life in lives if life in era.members)
        return sum(last - first for first, last in parts)

    def _part(self, era: Era, step: int, life: Life) -> Span:
        start, stop = self._bounds(era, step)
        return even_bounds(stop - start, len(era.members), era.members.index(life))

    def full(self, step: int) -> int:
        """The number of samples of a step that is not the last one."""
        return self._batch(self.at(step))

    def _batch(self, era: Era) -> int:
        return self.batch if self._usual is None else in_proportion(self.batch, len(era.members), self._usual)

    def growth(self, step: int) -> float:
        """How many times as many samples as ``batch`` a full step has because of the number of its members."""
        return 1.0 if self._usual is None else len(self.at(step).members) / self._usual

    def size(self, step: int) -> int:
        """The number of samples of a step."""
        start, stop = self._bounds(self.at(step), step)
        return stop - start

    def rest(self, step: int) -> tuple[tuple[Span, ...], int]:
        """What others have ``left`` when ``step`` begins, and the ``first`` sample after that."""
        era = self.at(step)
        taken = self._bounds(era, step - 1)[1] if step > era.since else 0
        owed = length_of(era.left)
        return cut_of(era.left, taken, owed), era.first + max(0, taken - owed)

    def due(self, step: int) -> int | None:
        """The number of samples that are trained from ``step`` to the end; ``None`` if no number of samples ends training."""
        if self.total is None:
            return None
        left, first = self.rest(step)
        return length_of(left) + max(0, self.total - first)

    def change(self, since: int, members: Sequence[Life], complete: int) -> None:
        """These are the members from ``since`` on, which is not before the last change. ``complete``: the newest step that counts
        with the gradients of all who trained it; later ones count without those who are gone now."""
        since = max(since, self.eras[0].since)
        before = self.eras[-1]
        left, first = self.rest(since)
        owed = list(left)
        for life, low in self._gone.items():  # a step that one of the members then had completed, but none that is left now
            owed += self._left_by(life, complete + 1, low)
            self._gone[life] = min(low, max(complete + 1, self.eras[0].since))
        for life in before.members:
            if life not in members:
                low = max(complete + 1, self.eras[0].since)
                owed += self._left_by(life, low, since)
                self._gone[life] = min(low, since)
        if before.since == since:  # no step of it has begun
            self.eras.pop()
        self.eras.append(Era(since, tuple(members), first, merged(owed)))

    def _left_by(self, life: Life, low: int, high: int) -> list[Span]:
        return [span for step in range(max(low, self.eras[0].since), high) for span in self.spans(step, life)]

    def _bounds(self, era: Era, step: int) -> Span:
        """The samples of a step, counted from the first of its era."""
        batch = self._batch(era)
        start = (step - era.since) * batch
        stop = start + batch
        if self.total is not None and step >= era.since:
            whole = self._whole(era)
            start, stop = min(start, whole), min(stop, whole)
            if whole - stop < len(era.members):  # too few for a step
                stop = whole
        return start, stop

    def _whole(self, era: Era) -> int:
        """The number of samples from the beginning of an era to the end of training."""
        assert self.total is not None
        return length_of(era.left) + max(0, self.total - era.first)

    @property
    def end(self) -> int | None:
        """The step before which training ends, as far as is known now; ``None`` if nothing ends it."""
        if self.steps is not None:
            return self.steps
        if self.total is None:
            return None
        end = self._end_in(self.eras[-1])
        for era, later in zip(reversed(self.eras[:-1]), reversed(self.eras), strict=False):
            if end > later.since:
                break
            end = min(self._end_in(era), later.since)  # the later era has nothing to train: it came after the end
        return end

    def _end_in(self, era: Era) -> int:
        """The end of training as it is known in an era, or its first step if it has nothing to train."""
        full, more = divmod(self._whole(era), self._batch(era))
        return era.since + full + (more >= len(era.members))


def in_proportion(batch: int, members: int, usual: int) -> int:
    """The samples of a step for ``members`` workers, if it has ``batch`` for the usual number of them."""
    return max(1, round(batch * members / usual))


def length_of(spans: Iterable[Span]) -> int:
    """The number of samples in ``spans``."""
    return sum(stop - start for start, stop in spans)


def cut_of(spans: Iterable[Span], start: int, stop: int) -> tuple[Span, ...]:
    """Of the samples of ``spans``, in their order, those from ``start`` up to ``stop``."""
    found, before = [], 0
    for first, last in spans:
        low, high = max(first, first + start - before), min(last, first + stop - before)
        if low < high:
            found.append((low, high))
        before += last - first
    return tuple(found)


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same samples by position, in as few spans as possible."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def _is_life(value: object) -> bool:
    match value:
        case [str(), int()]:
            return True
    return False


def spans_of(value: Iterable[object], error: type[Exception]) -> tuple[Span, ...]:
    """The spans that a checkpoint or another worker gives as lists of two whole numbers. Raises ``error``."""
    spans = []
    for span in value:
        match span:
            case [int(start), int(stop)] if 0 <= start < stop:
                spans.append((start, stop))
            case _:
                raise error(f"{span!r:.100} are not positions of samples")
    return tuple(spans)
