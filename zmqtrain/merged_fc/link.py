"""Connects a worker's compute thread with the FC server: activations out, gradients back, while the thread may go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zmqtrain.data.bridge import Begun, Bridge
from zmqtrain.errors import UsageError
from zmqtrain.merged_fc.client import FcClient
from zmqtrain.merged_fc.messages import ActivationsMeta, AnswerMeta
from zmqtrain.train.device.base import Device
from zmqtrain.train.metrics import Sums
from zmqtrain.train.slot import Slot
from zmqtrain.train.structure import take_apart
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.words import typed


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The message of a worker about one micro-batch: activations, targets, and their place in the step."""

    step: int
    number: int
    count: int
    """The number of micro-batches in this worker's step."""
    samples: int
    divisor: float
    """The number of samples in the group's whole batch."""
    hyperparameters: Sequence[Mapping[str, Value] | None] | None


class OnItsWay:
    """A micro-batch whose gradients have not arrived yet."""

    def __init__(self, begun: Begun[AnswerMeta], activations: Sequence[Tensor], gradients: Sequence[Tensor], sent: object) -> None:
        self._begun, self._sent = begun, sent
        self._wanted = [each for each in activations if each.requires_grad]
        self._gradients = gradients

    def wait(self) -> AnswerMeta:
        """Block until the answer has arrived and, if there are any, the gradients. Returns the answer."""
        answer = self._begun.wait()
        self._sent = None
        return answer

    @property
    def waited_s(self) -> float:
        """Seconds that `wait` has taken."""
        return self._begun.waited_s

    def backward(self, *, nothing: bool = False) -> None:
        """Run the backward of the layers that computed the activations. ``nothing``: their gradients are zero."""
        for each in self._gradients if nothing else ():
            each.zero_()
        gradients = [mine.to(each.device) for mine, each in zip(self._gradients, self._wanted, strict=True)]
        torch.autograd.backward(self._wanted, gradients)


class FcLink:
    """The link of one worker. Made and closed on the event loop's thread; everything else is called in the compute thread."""

    def __init__(self, client: FcClient, device: Device, timeout_s: float, slot: Slot | None = None) -> None:
        """``slot``: the slot on which this worker takes turns with others, if it shares one."""
        self._client = client
        self._slot, self._step = slot, 0
        self._bridge = Bridge(device.condition(), device.clock, 2 * timeout_s)  # the work has time-outs of its own
        self.slot_waited_s = 0.0
        """Total seconds waited for the slot."""

    def send(self, micro_batch: MicroBatch, activations: Sequence[Tensor], target: Any) -> OnItsWay:
        """Send activations; their gradients come back if they need any. Raises `UsageError` if they cannot be sent."""
        wanted = tuple(each.requires_grad for each in _checked(activations, micro_batch.samples))
        payloads, structure = _outgoing(activations, target)
        meta = ActivationsMeta(
            len(payloads),
            wanted,
            micro_batch.samples,
            micro_batch.count,
            float(micro_batch.divisor),
            structure,
            micro_batch.hyperparameters,
        )
        into = [torch.empty(each.shape, dtype=each.dtype) for each in activations if each.requires_grad]
        targets = [TensorPayload.of(each) for each in into]
        work = self._client.train(micro_batch.step, micro_batch.number, meta, payloads, targets)
        begun = self._bridge.begin(work, f"the gradients of the activations of step {micro_batch.step}")
        return OnItsWay(begun, activations, into, payloads)

    def evaluate(self, activations: Sequence[Tensor], target: Any, samples: int) -> Begun[Sums]:
        """Have a batch evaluated; the result is the sums of the metrics over these samples."""
        payloads, structure = _outgoing(_checked(activations, samples), target)
        meta = ActivationsMeta(len(payloads), (False,) * len(activations), samples, structure=structure)

        async def work() -> Sums:
            return np.array(await self._client.evaluate(meta, payloads))

        return self._bridge.begin(work(), "an evaluation by the FC server")

    @contextmanager
    def turn(self, step: int) -> Iterator[None]:
        """A context in which it is this worker's turn on its slot, for ``step``."""
        self._step = step
        self._take_slot()
        try:
            yield
        finally:
            if self._slot is not None and self._bridge.error is None:
                self._bridge.begin(self._slot.give(), "the end of the turn").wait()

    @contextmanager
    def no_turn(self) -> Iterator[None]:
        """A context, for a wait, in which other workers may use the slot; without effect if it is not this worker's turn."""
        slot = self._slot
        if slot is None or not slot.held:
            yield
            return
        self._bridge.begin(slot.give(), "the end of the turn").wait()
        yield
        self._take_slot()

    def _take_slot(self) -> None:
        if self._slot is not None:
            taken = self._bridge.begin(self._slot.take(self._step), "the slot")
            taken.wait()
            self.slot_waited_s += taken.waited_s

    def abort(self, error: BaseException) -> None:
        """Every wait, now and later, raises ``error``. May be called in any thread."""
        self._bridge.abort(error)

    async def close(self) -> None:
        """Abandon all pending work, and tell the server."""
        await self._bridge.close()
        await self._client.finish()


def _checked(activations: Sequence[Any], samples: int) -> Sequence[Tensor]:
    for place, each in enumerate(activations):
        if not isinstance(each, Tensor) or not each.dim() or each.shape[0] != samples:
            found = f"of shape {list(each.shape)}" if isinstance(each, Tensor) else f"that is {typed(each)}"
            raise UsageError(
                f"a value {found} passes between the two phases (number {place + 1} of {len(activations)}); each must be a tensor "
                f"with the batch's {samples} samples along its first dimension. Name another module in [exchange] split"
            )
    return activations


def _outgoing(activations: Sequence[Tensor], target: Any) -> tuple[list[Payload], Value]:
    structure, tensors = take_apart(target)
    return [TensorPayload.of(each.detach().to("cpu").contiguous()) for each in (*activations, *tensors)], structure
