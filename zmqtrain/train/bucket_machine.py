"""Where each bucket of a replica is, and what is to be done with it next. No tensors, threads, event loop or clock.

Every replica (torch's, the modelled one, the one under DistributedDataParallel) has such a machine, tells it what happens, and
carries out what it answers. A bucket is in one of three states:

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
- With `Optimize.AFTER` nobody reads a bucket's parameters between the exchange's answer and the update by it.
- With `Optimize.BEFORE` and `Optimize.AFTER` the optimizer runs on each bucket once in a step.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from enum import Enum
from typing import NamedTuple

from zmqtrain.exchange.base import Optimize


class State(Enum):
    """Whose a bucket is."""

    OPEN = "open"
    """The compute side's: parameters may be read, gradients are being added up or are there."""
    CLOSED = "closed"
    """The exchange's."""
    ANSWERED = "answered"
    """The exchange is through with it, and the compute side has not taken it back yet."""


class Do(Enum):
    """What a replica does with one bucket."""

    COMPLETE = "complete"
    """All gradients of the bucket have come: do what is left to be done with them here."""
    NOTE = "note"
    """Keep the hyperparameters as they are now, for the update to come: a schedule may change them meanwhile."""
    UPDATE = "update"
    """Run the optimizer on the bucket's parameters."""
    HAND_OVER = "hand over"
    """Give the bucket to the exchange."""
    FETCH = "fetch"
    """Take what the exchange has written into the memory that the compute side reads."""
    FORGET = "forget"
    """The next backward makes the bucket's gradients anew instead of adding to them."""


class Action(NamedTuple):
    """One thing to do."""

    do: Do
    bucket: int


class BucketMachine:
    """The state of all buckets of one replica.

    `answered` and `abort` may be called in another thread than the rest: each changes one value, which the others only read.
    A thread that waits for them needs a lock, which `zmqtrain.train.gates.Gates` adds.
    """

    def __init__(self, gradients: Sequence[Collection[Hashable]], *, overlap: bool = True) -> None:
        """Arguments:
        gradients: for each bucket, in order, the names of the gradients that it waits for in a backward.
        overlap: whether buckets are handed over while backward goes on; otherwise all at its end.
        """
        self.when = Optimize.APART
        """When the optimizer runs. Changed only before the first step."""
        self.error: BaseException | None = None
        """What broke the exchange, if anything did."""
        self._gradients = [frozenset(names) for names in gradients]
        self._overlap = overlap
        self._states = [State.OPEN] * len(gradients)
        self._missing: list[set[Hashable]] = [set() for _ in gradients]
        self._handed_over = [False] * len(gradients)  # since the bucket was taken last
        self._due = [False] * len(gradients)  # the update runs when the bucket is taken
        self._last = False
        self._next = len(gradients)

    def __len__(self) -> int:
        return len(self._states)

    def state(self, bucket: int) -> State:
        return self._states[bucket]

    # Backward.

    def begin_backward(self, *, last: bool) -> None:
        """A backward begins. ``last``: no other one of this step follows, so complete buckets are handed over."""
        self._last, self._next = last, 0
        self._missing = [set(names) for names in self._gradients]

    @property
    def last(self) -> bool:
        """Whether a step's last backward is under way."""
        return self._last

    @property
    def all_handed_over(self) -> bool:
        """Whether the backward that began last has nothing left to hand over."""
        return self._next == len(self._states)

    def missing(self, bucket: int) -> Collection[Hashable]:
        """The names of the gradients that have not come in this backward."""
        return self._missing[bucket]

    def gradient(self, bucket: int, name: Hashable) -> bool:
        """A gradient is complete. Only a step's last backward counts. Returns whether `hand_over` has something to do now.

        Raises `ValueError` where it has come before in this backward: its bucket may be on its way already.
        """
        if not self._last:
            return False
        missing = self._missing[bucket]
        if name not in missing:
            raise ValueError(f"the gradient {name!r} of bucket {bucket} came twice in one backward")
        missing.discard(name)
        return self._overlap and bucket == self._next and not missing

    def end_backward(self) -> None:
        """The backward has ended: gradients that have not come are zeros, so after a step's last one all buckets are complete."""
        if self._last:
            self._last = False
            for missing in self._missing:
                missing.clear()

    def hand_over(self) -> list[Action]:
        """What to do with the buckets that are complete, up to the first that is not. Their gates are closed."""
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
        """The step counts for nothing: no update is due, and whatever was to be handed over is the compute side's again."""
        self._last = False
        self._states = [State.ANSWERED] * len(self._states)
        self._due = [False] * len(self._due)

    # Between the exchange's answer and the next use.

    def due(self, bucket: int) -> bool:
        """Whether the exchange answers with gradients to update by, and not with parameters."""
        return self._due[bucket]

    def answered(self, bucket: int) -> None:
        """The exchange is through with the bucket."""
        self._states[bucket] = State.ANSWERED

    def take(self, bucket: int) -> Sequence[Do] | None:
        """The compute side needs the bucket. Returns what to do before anything reads its parameters or writes its gradients; None
        while the exchange has it.

        Raises what `abort` was given, unless the bucket is open.
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
        if self._handed_over[bucket]:  # otherwise somebody has only looked at the parameters, and gradients are still added up
            self._handed_over[bucket] = False
            todo.append(Do.FORGET)
        return todo

    def abort(self, error: BaseException) -> None:
        """The exchange broke: `take` raises ``error`` from now on. The first error counts."""
        if self.error is None:
            self.error = error
