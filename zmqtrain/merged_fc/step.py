"""One training step of a worker whose fully connected layers are computed by the FC server, in the compute thread.

::

    forward -> activations out -> [ forward of the next micro-batch ] -> gradients of the activations back -> backward
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from zmqtrain.data.batch import Batch
from zmqtrain.errors import NonFiniteLossError
from zmqtrain.events import Recorder
from zmqtrain.merged_fc.client import GIVEN_UP
from zmqtrain.merged_fc.link import FcLink, MicroBatch, OnItsWay
from zmqtrain.merged_fc.messages import AnswerMeta
from zmqtrain.train.device.base import Device
from zmqtrain.train.replica import TorchReplica
from zmqtrain.train.step import StepSettings, autocast
from zmqtrain.train.task import user_code
from zmqtrain.train.work import StepResult
from zmqtrain.wire.payload import Value

#: The changes that a schedule has made to the optimizer's parameter groups; ``None`` if there are none.
Hyperparameters = Callable[[], Sequence[Mapping[str, Value] | None] | None]


class MergedStep:
    """Forward and backward of the convolution phase.

    With several micro-batches, one is computed while the FC server has the previous one. The mean loss is that of the whole group.
    """

    def __init__(
        self,
        replica: TorchReplica,
        link: FcLink,
        device: Device,
        settings: StepSettings,
        hyperparameters: Hyperparameters,
        recorder: Recorder,
    ) -> None:
        self._replica, self._link, self._settings, self._recorder = replica, link, settings, recorder
        replica.waiting = link.no_turn
        self._device, self._clock, self._hyperparameters = device.torch_device, device.clock, hyperparameters
        self._loss = self._samples = self._waited_s = self._served_s = 0.0

    def __call__(
        self,
        step: int,
        batch: Batch,
        *,
        hand_over: bool = True,
        group_batch: float | None = None,
        group_samples: int | None = None,
    ) -> StepResult:
        """Compute a step. Raises `NonFiniteLossError` before the backward of the micro-batch in question, and `TaskError`."""
        start, slot_waited_s = self._clock(), self._link.slot_waited_s
        with self._link.turn(step):
            self._compute(step, batch, hand_over, float(group_batch or self._settings.group_batch))
        slot_s = self._link.slot_waited_s - slot_waited_s
        waited_s = self._replica.waited_s + slot_s
        compute_s = self._clock() - start - waited_s - self._waited_s
        exposed_s = waited_s + max(0.0, self._waited_s - self._served_s)
        mean = self._loss / self._samples if self._samples else None
        return StepResult(mean, batch.samples, compute_s, exposed_s, fc_wait_s=self._waited_s)

    def _compute(self, step: int, batch: Batch, hand_over: bool, divisor: float) -> None:
        replica, settings = self._replica, self._settings
        replica.model.train()
        replica.begin_step(step)
        self._loss = self._samples = self._waited_s = self._served_s = 0.0
        parts = batch.to(self._device).split(settings.accumulate)
        changed = self._hyperparameters()
        under_way: deque[tuple[OnItsWay, int]] = deque()
        for number, part in enumerate(parts):
            with self._recorder.span("forward", "compute", step=step):
                with autocast(self._device, settings.precision), user_code("the model's forward"), replica.forward():
                    activations = part.output(replica.model)
                micro_batch = MicroBatch(step, number, len(parts), part.samples, divisor, changed)
                under_way.append((self._link.send(micro_batch, activations, part.target), part.samples))
                del activations
            if len(under_way) > 1:
                self._backward(step, *under_way.popleft(), last=False)
        while under_way:
            sent, samples = under_way.popleft()
            self._backward(step, sent, samples, last=hand_over and not under_way)

    def _backward(self, step: int, sent: OnItsWay, samples: int, *, last: bool) -> None:
        replica = self._replica
        with self._link.no_turn(), self._recorder.span("wait for the FC server", "wait", step=step):
            answer: AnswerMeta = sent.wait()
        self._waited_s += sent.waited_s
        self._served_s += answer.compute_s
        given_up = answer is GIVEN_UP  # then the gradients of this step go nowhere, but their buckets must be handed over
        if not given_up:
            value = math.nan if answer.loss is None else answer.loss
            if not answer.gradients and not math.isfinite(value):
                raise NonFiniteLossError(value, self._settings.rank, step)
            self._loss += value * samples
            self._samples += samples
        replica.begin_backward(last=last)
        with self._recorder.span("backward", "compute", step=step), user_code("the backward pass"):
            sent.backward(nothing=given_up)
        replica.end_backward()
