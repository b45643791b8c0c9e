"""The state of each bucket of a replica, and what to do with it next. No tensors, threads, event loop or clock.

Every replica (torch's, the modelled one, the one under DistributedDataParallel) has such a machine, reports events to it, and
carries out the actions that it returns. A bucket is in one of three states:

========  =====================  ========  ===================================================================================
state     what happens           becomes   to be done, in this order
========  =====================  ========  ===================================================================================
OPEN      `hand_over`            CLOSED    COMPLETE; unless `Optimize.APART`: NOTE; `Optimize.BEFORE`: UPDATE; HAND_OVER
CLOSED    `take`                 CLOSED    nothing: wait for `answered`, then call `take` again
any       `answered`             ANSWERED  nothing
ANSWERED  `take`                 OPEN      FETCH; `Optimize.AFTER`: UPDATE if it was handed over; FORGET if it was handed over
OPEN      `take`                 OPEN      nothing
========  =====================  ========  ===================================================================================

From this follows, for gradients that come in any order:

- Buckets are handed over in the order of their numbers, each once in a step, so all workers of a group hand over alike.
- With `Optimize.AFTER`, nothing reads a bucket's parameters between the exchange's answer and the update.
- With `Optimize.BEFORE` and `Optimize.AFTER` the optimizer runs on each bucket once in a step.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from enum import Enum
from typing import NamedTuple

from zmqtrain.exchange.base import Optimize


class State(Enum):
    """Which side owns a bucket."""

    OPEN = "open"
    """The compute side: parameters may be read; gradients are complete or still being accumulated."""
    CLOSED = "closed"
    """The exchange's."""
    ANSWERED = "answered"
    """The exchange has finished with it, and the compute side has not taken it back yet."""


class Do(Enum):
    """An action of a replica on one bucket."""

    COMPLETE = "complete"
    """All gradients of the bucket have arrived: finish the local work on them."""
    NOTE = "note"
    """Save the current hyperparameters for the coming update, since a schedule may change them in the meantime."""
    UPDATE = "update"
    """Run the optimizer on the bucket's parameters."""
    HAND_OVER = "hand over"
    """Give the bucket to the exchange."""
    FETCH = "fetch"
    """Copy what the exchange has written into the memory that the compute side reads."""
    FORGET = "forget"
    """The next backward overwrites the bucket's gradients instead of adding to them."""


class Action(NamedTuple):
    """A decision of the machine: what to do, and with which bucket."""

    do: Do
    bucket: int


class BucketMachine:
    """The state of all buckets of one replica.

    `answered` and `abort` may be called from another thread than the rest: each changes one value that the other methods only read.
    A thread that waits for them needs a lock, which `zmqtrain.train.gates.Gates` adds.
    """

    def __init__(self, gradients: Sequence[Collection[Hashable]], *, overlap: bool = True) -> None:
        """
        Args:
            gradients: for each bucket, in order, the names of the gradients that it waits for in a backward.
            overlap: whether buckets are handed over while backward still runs; otherwise all are handed over at its end.
        """
        self.when = Optimize.APART
        """When the optimizer runs. Changed only before the first step."""
        self.error: BaseException | None = None
        """The error that broke the exchange, if any."""
        self._gradients = [frozenset(names) for names in gradients]
        self._overlap = overlap
        self._states = [State.OPEN] * len(gradients)
        self._missing: list[set[Hashable]] = [set() for _ in gradients]
        self._handed_over = [False] * len(gradients)  # since the bucket was last taken
        self._due = [False] * len(gradients)  # the update runs when the bucket is taken
        self._last = False
        self._next = len(gradients)

    def __len__(self) -> int:
        return len(self._states)

    def state(self, bucket: int) -> State:
        return self._states[bucket]

    # Backward.

    def begin_backward(self, *, last: bool) -> None:
        """A backward begins. ``last``: it is the last one of this step, so complete buckets are handed over."""
        self._last, self._next = last, 0
        self._missing = [set(names) for names in self._gradients]

    @property
    def last(self) -> bool:
        """Whether a step's last backward is under way."""
        return self._last

    @property
    def all_handed_over(self) -> bool:
        """Whether the most recent backward has nothing left to hand over."""
        return self._next == len(self._states)

    def missing(self, bucket: int) -> Collection[Hashable]:
        """The names of the gradients that have not arrived in this backward."""
        return self._missing[bucket]

    def gradient(self, bucket: int, name: Hashable) -> bool:
        """A gradient is complete. Only a step's last backward counts. Returns whether `hand_over` now has something to do.

        Raises `ValueError` if it has already arrived in this backward: its bucket may be on its way.
        """
        if not self._last:
            return False
        missing = self._missing[bucket]
        if name not in missing:
            raise ValueError(f"the gradient {name!r} of bucket {bucket} came twice in one backward")
        missing.discard(name)
        return self._overlap and bucket == self._next and not missing

    def end_backward(self) -> None:
        """The backward has ended. Gradients that have not arrived are zeros, so after a step's last backward all buckets are
        complete."""
        if self._last:
            self._last = False
            for missing in self._missing:
                missing.clear()

    def hand_over(self) -> list[Action]:
        """What to do with the complete buckets, up to the first incomplete one. These buckets are closed."""
        actions: list[Action] = []
        while self._next < len(self._states) and not self._missing[self._next]:
            bucket = self._next
            assert self._states[bucket] is State.OPEN, f"bucket {bucket} is handed over while it is {self._states[bucket].value}"
            self._next += 1
            actions.append(Action(Do.COMPLETE, bucket))
            if self.when is not Optimize.APART:
                actions.append(Action(Do.NOTE, bucket))
            if self.when is Optimize.BEFORE:
                actions.append(Action(Do.UPDATE, bucket))
            self._due[bucket] = self.when is Optimize.AFTER
            self._handed_over[bucket] = True
            self._states[bucket] = State.CLOSED
            actions.append(Action(Do.HAND_OVER, bucket))
        return actions

    def take_back(self) -> None:
        """Discard the step: no update is due, and the compute side owns all buckets again."""
        self._last = False
        self._states = [State.ANSWERED] * len(self._states)
        self._due = [False] * len(self._due)

    # Between the exchange's answer and the next use.

    def due(self, bucket: int) -> bool:
        """Whether the exchange answers with gradients to update by, and not with parameters."""
        return self._due[bucket]

    def answered(self, bucket: int) -> None:
        """The exchange has finished with the bucket."""
        self._states[bucket] = State.ANSWERED

    def take(self, bucket: int) -> Sequence[Do] | None:
        """The compute side needs the bucket. Returns what to do before anything reads its parameters or writes its gradients, or
        ``None`` while the exchange has it.

        Raises the error given to `abort`, unless the bucket is open.
        """
        state = self._states[bucket]
        if state is State.OPEN:
            return ()
        if self.error is not None:
            raise self.error
        if state is State.CLOSED:
            return None
        self._states[bucket] = State.OPEN
        todo = [Do.FETCH]
        if self._due[bucket]:
            self._due[bucket] = False
            todo.append(Do.UPDATE)
        if self._handed_over[bucket]:  # otherwise only the parameters were read, and gradients are still being added up
            self._handed_over[bucket] = False
            todo.append(Do.FORGET)
        return todo

    def abort(self, error: BaseException) -> None:
        """The exchange broke: `take` raises ``error`` from now on. Only the first error is kept."""
        if self.error is None:
            self.error = error
