"""The messages between workers and an FC server, as data.

======================  ==================  ===========================================  =========================================
message                 from, to            tag (or method)                              carries
======================  ==================  ===========================================  =========================================
activations             worker to server    ``("activations", step, micro, place)``      a tensor; at place 0 an `ActivationsMeta`
answer                  server to worker    ``("fc_answer", step, micro)``               an `AnswerMeta`
gradient                server to worker    ``("fc_gradient", step, micro, place)``      the gradient of an activation
evaluate                worker to server    ``("activations", "evaluate", number, p)``   a tensor; at place 0 an `ActivationsMeta`
measured                server to worker    ``("fc_measured", number)``                  sums of the metrics
fc_keep (request)       worker 0 to server  ``fc_keep``, the step, whether to save it    keep the current state
fc_model (request)      worker 0 to server  ``fc_model``, the step                       then ``("fc_model", step)``: its state
fc_hold (request)       worker to server    ``fc_hold``, true or false                   train no group while this worker evaluates
fc_refused (request)    server to worker    ``fc_refused``                               why activations were refused
fc_finished (request)   worker to server    ``fc_finished``                              this worker no longer needs the server
======================  ==================  ===========================================  =========================================

Tensors have samples along their first dimension. Targets are sent like activations, after them.

If workers may be lost, tags end with a life: of the team for which a step is trained, and of the process otherwise. So nothing that
was meant for another one is taken for an answer. `zmqtrain.exchange.server_changes` then tells the server who trains, as it tells
model servers, and ``finished`` takes the place of ``fc_finished``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zmqtrain.errors import ProtocolError
from zmqtrain.net.endpoint import Tag
from zmqtrain.wire.payload import Value

#: The first element of the tags of everything that workers send to be computed.
ACTIVATIONS = "activations"
EVALUATE = "evaluate"
#: Both phases wait for these messages, so they go before all buckets.
PRIORITY = 1 << 20
#: The most tensors in a batch: far more than pass between the two phases of any model.
MOST_TENSORS = 256


@dataclass(frozen=True, slots=True)
class ActivationsMeta:
    """Sent with the first tensor of a batch."""

    tensors: int
    """The number of tensors, targets included."""
    wanted: tuple[bool, ...]
    """For each activation, whether its gradient is wanted. The tensors after the activations are the target's."""
    samples: int
    micro_batches: int = 1
    """The number of micro-batches in this worker's step."""
    divisor: float = 1.0
    """The number of samples in the group's whole batch: the loss of n samples counts n / ``divisor``."""
    structure: Value = 0
    """How the target is made of its tensors (`zmqtrain.train.structure`)."""
    hyperparameters: Sequence[Mapping[str, Value] | None] | None = None
    """For each of the optimizer's parameter groups, the hyperparameters that differ from the initial ones at this step, if any."""
    torn: tuple[tuple[int, int], ...] = ()
    """The lives that were lost while they trained this batch, and their steps (`zmqtrain.data.slots.Slot`)."""

    def to_value(self) -> Value:
        head: list[Value] = [self.tensors, list(self.wanted), self.samples, self.micro_batches, self.divisor, self.structure]
        changed: list[Value] = [None if group is None else dict(group) for group in self.hyperparameters or ()]
        if self.torn:
            torn: list[Value] = [[life, step] for life, step in self.torn]
            return [*head, None if self.hyperparameters is None else changed, torn]
        return head if self.hyperparameters is None else [*head, changed]

    @classmethod
    def from_value(cls, value: Value) -> ActivationsMeta:
        """Raises `ProtocolError` if ``value`` is not a result of `to_value`."""
        match value:
            case [int(tensors), list(wanted), int(samples), int(micro_batches), float(divisor), structure, *more] if len(more) < 3:
                sound = 0 < len(wanted) <= tensors <= MOST_TENSORS and samples > 0 and divisor > 0 and set(wanted) <= {True, False}
                changed: Any = more[0] if more else None
                torn: Any = more[1] if len(more) > 1 else []
                if sound and (changed is None or _are_hyperparameters(changed)) and _are_lives(torn):
                    lost = tuple((life, step) for life, step in torn)
                    return cls(tensors, tuple(wanted), samples, micro_batches, divisor, structure, changed, lost)
        raise ProtocolError(f"invalid description of activations: {value!r:.200}")


@dataclass(frozen=True, slots=True)
class AnswerMeta:
    """The result of a turn."""

    loss: float | None
    """The mean over the micro-batch of the whole group; ``None`` if nothing is computed."""
    compute_s: float
    gradients: int
    """The number of gradients that follow; 0 if the loss is not finite and the run is to stop."""

    def to_value(self) -> Value:
        return [self.loss, self.compute_s, self.gradients]

    @classmethod
    def from_value(cls, value: Value) -> AnswerMeta:
        """Raises `ProtocolError` if ``value`` is not a result of `to_value`."""
        match value:
            case [None | float() as loss, float(compute_s), int(gradients)]:
                return cls(loss, compute_s, gradients)
        raise ProtocolError(f"an FC server answered {value!r:.100}; it must be loss, time and number of gradients")


def activations_tag(step: int, micro_batch: int, place: int, life: int | None = None) -> Tag:
    return _of(life, ACTIVATIONS, step, micro_batch, place)


def evaluate_tag(number: int, place: int, life: int | None = None) -> Tag:
    return _of(life, ACTIVATIONS, EVALUATE, number, place)


def parse_activations_tag(tag: Tag) -> tuple[tuple[str | int, int], int, int | None]:
    """The batch (step and micro-batch, or ``evaluate`` and a number), the tensor's place, and the life, if workers may be lost.
    Raises `ProtocolError`."""
    life = tag[4] if len(tag) == 5 else None
    if life is None or isinstance(life, int):
        match tag[:4] if len(tag) == 5 else tag:
            case (_, int(step), int(micro_batch), int(place)):
                return (step, micro_batch), place, life
            case (_, str(what), int(number), int(place)) if what == EVALUATE:
                return (what, number), place, life
    raise ProtocolError(f"{tag!r} is not a tag of activations, such as ('activations', step, micro-batch, place)")


def answer_tag(step: int, micro_batch: int, life: int | None = None) -> Tag:
    return _of(life, "fc_answer", step, micro_batch)


def gradient_tag(step: int, micro_batch: int, place: int, life: int | None = None) -> Tag:
    return _of(life, "fc_gradient", step, micro_batch, place)


def measured_tag(number: int, life: int | None = None) -> Tag:
    return _of(life, "fc_measured", number)


def model_tag(step: int, life: int | None = None) -> Tag:
    return _of(life, "fc_model", step)


def _of(life: int | None, *tag: str | int) -> Tag:
    return tag if life is None else (*tag, life)


def _are_lives(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, list) and len(each) == 2 and all(isinstance(number, int) for number in each) for each in value
    )


def _are_hyperparameters(value: Value) -> bool:
    return isinstance(value, list) and all(each is None or isinstance(each, dict) for each in value)
