"""Whether the losses of a script's own loop are means over its worker's samples.

A worker's gradient is weighted by its share of the group's samples, which is right only if its loss is their mean. So each loss is
looked at before its backward: by its operations (`zmqtrain.train.loss_graph`), in the first steps by second derivatives and by what
it sums (`zmqtrain.train.loss_sums`), and by its constants, which workers compare at the end of the step
(`zmqtrain.train.loss_trial`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from zmqtrain.embed.pieces import Pieces
from zmqtrain.errors import TaskError
from zmqtrain.train.loss_graph import not_a_mean, watch_backward
from zmqtrain.train.loss_sums import HIDDEN, hidden, summed
from zmqtrain.train.loss_trial import OF_SAMPLES, Constants, constants_of, couples, foreign_parameters
from zmqtrain.train.step import STEPS_LOOKED_AT
from zmqtrain.train.weighting import LOSSES_TRIED


@dataclass(frozen=True, slots=True)
class Batches:
    """The numbers of samples in the last batch."""

    own: int | None
    """This worker's; ``None`` if the loop has chosen them itself."""
    of_group: int | None
    """The samples of this worker's group; ``None`` as above."""
    workers: int
    """The number of workers in a group."""
    groups: int
    """The number of groups that make each step together."""
    divided: bool = False
    """Whether a group divides the model, and computes what the model returns without rows of all its samples."""

    @property
    def inside(self) -> int | None:
        """The samples of a loss that a divided model computes, if other groups have others."""
        return self.of_group if self.divided and self.groups > 1 else None

    def wholes(self, samples: int) -> set[int]:
        """The samples of the group and of all groups, if this worker has ``samples``."""
        of_group = self.of_group or samples * self.workers
        return {of_group, of_group * self.groups}


class LossWatch:
    """Watches the losses of one replicated model. Nothing happens before `attach`."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        *,
        batches: Callable[[], Batches],
        is_own_thread: Callable[[], bool],
        remark: Callable[[str], None],
        opened: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            parameters: those of ``model`` that are trained.
            batches: returns what is known of the last batch.
            is_own_thread: returns whether the calling thread is the one that runs ``model``. Sessions in other threads of the
                process have losses of their own.
            remark: called with what the user should know of a loss that need not be wrong.
            opened: makes a context in which the session itself may look into the model's graph.
        """
        self._batches, self._is_own_thread, self._remark, self._opened = batches, is_own_thread, remark, opened
        self._own = frozenset(map(id, parameters))
        #: Within `zmqtrain.embed.replicated.Replicated.accumulating`: second derivatives are not tried there.
        self.only_adding = False
        self._are_means = True
        self._constants = Constants()  # of this step's losses
        self._value = 0.0  # the sum of this step's losses, as far as they were read
        self._pieces = Pieces(model, lambda: self._batches().own)  # while losses are tried
        self._foreign: dict[int, nn.Parameter] = {}
        self._trials = LOSSES_TRIED  # how many more losses are differentiated twice
        self._reads = STEPS_LOOKED_AT  # how many more losses are looked at if that means waiting for a device

    def attach(self) -> list[Callable[[], None]]:
        """Begin to watch. Returns the functions that end it."""
        self._pieces.attach()
        return [watch_backward(self._before_backward), self._pieces.detach]

    @contextmanager
    def weighted_by_the_user(self) -> Iterator[None]:
        """A backward in here is of a sum whose weight the user gives, not of a mean."""
        self._are_means = False
        try:
            yield
        finally:
            self._are_means = True

    def take_constants(self) -> Constants:
        """What of the losses since the last call must be the same on all workers."""
        constants, self._constants = self._constants, Constants()
        return constants

    def take_value(self) -> float:
        """The sum of the losses since the last call."""
        value, self._value = self._value, 0.0
        return value

    def take_foreign_parameters(self) -> list[nn.Parameter]:
        """The parameters that losses depend on, besides the model's own, since the last call."""
        foreign, self._foreign = self._foreign, {}
        return list(foreign.values())

    def _before_backward(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Raises `TaskError` if ``loss`` is no mean over samples. Called in the thread of some session."""
        if self._is_own_thread():
            with self._opened():
                self._look_at(loss, gradient)

    def _look_at(self, loss: Tensor, gradient: Tensor | None) -> None:
        taken = self._pieces.take()
        if not self._are_means:
            return
        batches = self._batches()
        read, samples, inside = loss.device.type == "cpu" or self._reads > 0, batches.own, batches.inside
        if read:
            self._reads -= 1
            self._value += float(loss.detach()) if loss.numel() == 1 else 0.0
            if why := not_a_mean(loss, gradient, samples, inside=inside):
                raise TaskError(f"this loss is not a mean over this worker's samples: {why}")
        if self._trials and loss.numel() == 1 and not self.only_adding:
            self._trials -= 1
            self._foreign |= {id(each): each for each in foreign_parameters(loss, self._own)}
            outputs = taken.outputs
            rows = len(outputs[-1]) if outputs else inside
            wholes = batches.wholes(rows) if rows else ()
            if why := summed(loss, outputs, wholes, taken.inner, read=read, inside=inside) or (
                OF_SAMPLES if couples(loss, outputs) else ""
            ):
                raise TaskError(f"this loss is not a mean over this worker's samples: {why}")
            if hidden(loss):
                self._remark(HIDDEN)
            if not self._trials:
                self._pieces.detach()
        self._constants.add(constants_of(loss, samples, read=read, counted=True, inside=inside))
