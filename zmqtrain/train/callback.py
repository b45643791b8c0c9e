"""`Callback`: code of the user's own that is called as training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """What one worker knows about a step that it has done."""

    rank: int
    """The worker's number in the run, from 0."""
    step: int
    """The step's number, from 0."""
    loss: float | None = None
    """The mean over this worker's samples; ``None`` if a script has not reported it."""
    samples: int = 0
    """This worker's samples."""
    seconds: float = 0.0
    exposed_s: float = 0.0
    """Seconds of it in which the worker waited for the network."""
    lr: float | None = None
    """The learning rate of the optimizer's first parameter group; ``None`` in sessions."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Everything that ``events.jsonl`` has about the step."""


class Callback:
    """Override what you need: ``Task(callbacks=[...])``, or ``session.replicate(model, optimizer, callbacks=[...])``.

    Every worker calls its own objects: `StepDone.rank` tells which worker that is. Calls come in the worker's compute thread (in a
    session: in the thread of the loop), one after another and between steps, so the worker's next step waits for them. What a
    callback raises ends the run, like an error anywhere else in the task's code. Parameters may still be on their way when a
    callback is called: only `on_parameters` may read them. None may change them (that is refused).
    """

    def on_step(self, done: StepDone) -> None:
        """After each step of this worker. In a session: as soon as another ``optimizer.step()`` shows that nothing more will be
        reported about it, which may be two steps later, or at the session's end."""

    def on_parameters(self, step: int, model: nn.Module) -> None:
        """The model as it is after ``step`` steps, complete, to read: for averages of the weights (EMA, SWA), distances, norms.
        Called before the worker's first step, too, and after each of its steps, before `on_step`. It is what the worker begins its
        next step with: with gossip and averaging its group's own model, with asynchronous servers what this group has last read.

        A worker whose callbacks override this waits for all parameters after each step; communication is not hidden behind the
        next forward. Not in sessions, whose loop has the model, nor where a worker has only a part of it (a grid, ``merged_fc``):
        that is refused."""

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation in which this worker took part. All of them have the same metrics, except in gossip without
        ``average_evaluations``. In a session: when this worker reports one."""

    def on_checkpoint(self, step: int) -> None:
        """This worker's part of the checkpoint of ``step`` is on disk. The checkpoint is complete when all workers' are. Not in
        sessions, which keep their own."""

    def on_view(self, step: int, workers: Sequence[str]) -> None:
        """Before the first step (in a session: after it), and when workers were lost or have come back: these workers
        (``worker/0``, ...) train from ``step`` on."""
