"""One small batch through the divided model: outputs, loss, gradients, buffers and updates, beside those of the ordinary one.

Every process compares its own part: nothing is gathered but a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zmqtrain.data.batch import Batch
from zmqtrain.data.nested import mapped
from zmqtrain.parallel.communicator import Fabric, Label
from zmqtrain.parallel.placed.model import ParallelModel
from zmqtrain.parallel.placed.tensor import Placed
from zmqtrain.parallel.sums import sum_at_once
from zmqtrain.parallel.turns import turn
from zmqtrain.parallel.verify.case import (
    Case,
    Difference,
    Found,
    NotComparable,
    Phase,
    What,
    When,
    mean,
    multiply_weights,
    without_own_dropout,
)
from zmqtrain.parallel.verify.in_double import staying_in
from zmqtrain.parallel.verify.reference import Needs, Wanted, own_change, tensors_of, updated, wanted
from zmqtrain.parallel.verify.sketch import sketch
from zmqtrain.parallel.verify.smaller import cropped, parts_of
from zmqtrain.parallel.verify.tolerance import TIMES_OWN_CHANGE, distance, is_rounding, largest
from zmqtrain.parallel.verify.watch import Watch, block_of, watching


def compare(case: Case, fabric: Fabric, watch: Watch | None = None) -> Found:
    """Run both. All processes must call it; each returns what it has found in its own part.

    Raises `NotInDouble`, `NotSmaller` and `NotComparable`, each on all processes."""
    return _Comparison(case, fabric, watch).run()


class _Comparison:
    def __init__(self, case: Case, fabric: Fabric, watch: Watch | None) -> None:
        self._case, self._fabric, self._watch = case, fabric, watch
        self._batch = _in(case.batch, case.dtype)
        self._found = Found()
        self._gradient_sketches: dict[str, Tensor] = {}
        self._unsure: list[Difference] = []

    def run(self) -> Found:
        case, phase = self._case, self._case.phase
        divided = case.divide()
        without_own_dropout(divided.inner)
        needs = Needs.of_model(divided)
        before: dict[str, Tensor] = {}

        def prepare() -> None:
            if case.dtype is torch.float64:
                _to_double(divided)
            before.update(_sketches(divided))

        expected = wanted(case, self._batch, self._fabric, needs, parts_of(divided), self._watch, prepare)
        self._batch = cropped(self._batch, expected.sizes)
        self._found.sizes = expected.sizes
        with watching(self._watch, divided, phase):
            self._step(divided, expected, phase)
        self._gradients(divided, expected, phase)
        self._buffers(divided, expected, phase, "first")
        self._parameters(divided, before, expected, phase, "first")
        multiply_weights(divided)
        before = _sketches(divided)
        with torch.no_grad(), watching(self._watch, divided, "evaluation"):
            self._forward(divided, expected, "evaluation", "later")
        self._buffers(divided, expected, "evaluation", "later")
        self._parameters(divided, before, expected, "evaluation", "later")
        if case.optimizer is not None:
            self._updates(divided, expected, needs)
        self._decide()
        if expected.loss != expected.loss:
            raise NotComparable("the loss of the samples that were to be compared is not a number (do their targets count?)")
        return self._found

    def _forward(self, model: ParallelModel, expected: Wanted, phase: Phase, when: When) -> Tensor:
        """This process's summand of the loss. Its outputs are compared."""
        case, samples = self._case, self._batch.samples
        model.train(phase == "training")
        share = case.share(model, samples)
        share.begin(0 if phase == "training" else 1, 0, 1)
        start, stop = model.samples(samples)
        own = self._batch.part(slice(start, stop))
        with staying_in(case.dtype):
            output = own.output(model)
        mine = model.output_range()
        ranges = slice(start + mine.start, start + mine.stop), slice(start, stop)
        self._outputs(model, output, expected.outputs[when], ranges, phase)
        part = share.of_output(own)
        if not part.samples:  # others have all of them, and wait for this process's backward
            self._found.loss = 0.0
            return sum((each.sum() for each in tensors_of(output)), torch.zeros(())) * 0.0
        with staying_in(case.dtype):
            measured, weight = share.loss(case.loss, output, part.target), expected.weights[when]
            loss = mean(measured, trained=when == "first") * (part.samples / samples) if weight is None else measured[0] / weight
        if when == "first":
            self._found.loss = float(loss.detach()) / model.output_placement.copies
        return loss

    def _step(self, model: ParallelModel, expected: Wanted, phase: Phase) -> None:
        loss = self._forward(model, expected, phase, "first")
        with turn(), _sketching(model, self._gradient_sketches):  # what is computed again draws again
            loss.backward()  # type: ignore[no-untyped-call]
        by, of = abs(self._sum(self._found.loss) - expected.loss), abs(expected.loss)
        self._compared(phase, "loss", "", by if by == by else float("inf"), of, 0)

    def _sum(self, value: float) -> float:
        """Over all processes."""
        own = torch.tensor([value], dtype=torch.float64)
        return float(self._fabric.among(tuple(range(self._fabric.size))).all_reduce(own, Label("", "statistics")).wait()[0])

    def _outputs(
        self, model: ParallelModel, output: Any, expected: list[Tensor], ranges: tuple[slice, slice], phase: Phase
    ) -> None:
        found = tensors_of(output)
        if len(found) != len(expected):
            self._compared(phase, "output", "", float("inf"), 0.0, 0)
            return
        for number, (own, whole) in enumerate(zip(found, expected, strict=True)):
            part = part_of(model, own, whole, ranges, self._batch.samples)
            by, of = distance(own.local if isinstance(own, Placed) else own, part), largest(whole)
            self._compared(phase, "output", str(number), by, of, number)

    def _gradients(self, divided: ParallelModel, expected: Wanted, phase: Phase) -> None:
        """The sums of `sketch` are the sketches of the sums, and are all that travels."""
        found = _sums(divided, self._gradient_sketches)
        called, every = expected.order, len(list(divided.parameters()))
        most = max((of for (what, _), of in expected.largest.items() if what == "gradient"), default=0.0)
        for number, (name, _) in enumerate(divided.named_parameters()):
            part = expected.gradients.pop(name, None)
            if name not in found:
                continue
            order = -called.get(name.rpartition(".")[0], 0) * every - number  # backward begins with the last ones
            own = found[name].grad
            if part is None or own is None:
                if (part is None) != (own is None):
                    self._compared(phase, "gradient", name, float("inf"), 0.0, order)
                continue
            of = expected.largest["gradient", name]
            self._compared(phase, "gradient", name, distance(own, part), of, order, floor=most)

    def _buffers(self, divided: ParallelModel, expected: Wanted, phase: Phase, when: When) -> None:
        parts, found = expected.buffers[when], dict(divided.named_buffers())
        for number, name in enumerate(sorted(parts.keys() | found.keys())):
            if name not in parts or name not in found:
                self._compared(phase, "buffer", name, float("inf"), 0.0, number)
                continue
            of = max(expected.largest.get(("buffer", name), 0.0), largest(parts[name]))
            self._compared(phase, "buffer", name, distance(found[name], parts[name]), of, number)

    def _parameters(self, divided: ParallelModel, before: Mapping[str, Tensor], expected: Wanted, phase: Phase, when: When) -> None:
        """What the forward has made of them, or left alone."""
        parts = expected.parameters[when]
        for number, (name, now) in enumerate(_sketches(divided).items()):
            of = expected.largest.get(("parameter", name), largest(before[name]))
            self._compared(phase, "parameter", name, distance(now, parts.get(name, before[name])), of, number)

    def _updates(self, divided: ParallelModel, expected: Wanted, needs: Needs) -> None:
        """The same gradients on both sides, so that all that differs is the optimizer's: where one's sign decides, noise would."""
        if not expected.updates:
            return
        assert self._case.optimizer is not None
        optimizer, parameters = self._case.optimizer(divided), dict(divided.named_parameters())
        exact = self._case.dtype is torch.float64
        for number, name in enumerate(list(expected.updates)):
            update, parameter = expected.updates.pop(name), parameters[name]
            gradient = needs.parameters[name].pattern(update.seed)
            updated(optimizer, parameter, gradient.to(parameter.device, parameter.dtype))
            if not parameter.requires_grad or not parameter.numel():
                continue
            by, rounding = distance(sketch(parameter), update.after), update.largest * (1e-14 if exact else 1e-6)
            if not by <= (1e-6 if exact else 1e-3) * update.step + rounding:
                self._found.differences.append(Difference("training", "update", name, by, update.step, number))

    def _compared(self, phase: Phase, what: What, name: str, by: float, of: float, order: int, *, floor: float = 0.0) -> None:
        """Note a difference if it is one, or may be."""
        if is_rounding(self._case.dtype, by, of, floor=floor):
            return
        difference = Difference(phase, what, name, by, of, order)
        (self._found.differences if by == float("inf") else self._unsure).append(difference)

    def _decide(self) -> None:
        """What is more than rounding may be what rounding does to this model. That takes two more steps of the ordinary one, and so
        is found out only where someone asks for it."""
        if not self._sum(len(self._unsure)):
            return
        own: Mapping[tuple[What, str], float] = own_change(self._case, self._batch, self._fabric)
        for each in self._unsure:
            if not each.by <= TIMES_OWN_CHANGE * own.get((each.what, each.name), 0.0):
                self._found.differences.append(each)


def _to_double(divided: ParallelModel) -> None:
    """Where they are: the modules' own tensors, which the divided model has under their names, too."""
    for each in (*divided.parameters(), *divided.buffers()):
        if each.is_floating_point():
            each.data = each.data.double()


def _sketches(divided: ParallelModel) -> dict[str, Tensor]:
    return {name: sketch(each).clone() for name, each in divided.named_parameters()}


@contextmanager
def _sketching(divided: ParallelModel, found: dict[str, Tensor]) -> Iterator[None]:
    """Within, parameters' gradients are forgotten as soon as they are there. ``found`` gets the `sketch` of each, by name."""

    def ready(name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            own = sketch(gradient)
            found[name] = found[name] + own if name in found else own

    named = [(name, each) for name, each in divided.named_parameters() if each.requires_grad]
    handles = [each.register_post_accumulate_grad_hook(partial(ready, name)) for name, each in named]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sums(divided: ParallelModel, sketches: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """By the names of parameters, what stands for each: its gradient is the sum of all processes' ``sketches``."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in divided.named_parameters():
        if parameter.requires_grad and parameter.numel():
            found[name] = nn.Parameter(torch.empty_like(sketches[name] if name in sketches else sketch(parameter)))
            found[name].grad = sketches.get(name)
    sum_at_once(found.items(), divided.fabric, divided.shards_by_name())
    return found


def part_of(model: ParallelModel, own: Tensor, whole: Tensor, ranges: tuple[slice, slice], samples: int) -> Tensor:
    """Of what the ordinary model gives, what this process should have."""
    if isinstance(own, Placed):
        return block_of(whole, own.placement, model.fabric.rank)
    if own.dim() and whole.dim() and samples and whole.shape[0] % samples == 0:
        unit = whole.shape[0] // samples  # more than 1 where samples and time, say, have become one dimension
        for each in ranges:  # its own share of the column's samples, or all of these
            if own.shape[0] == (each.stop - each.start) * unit:
                return whole[each.start * unit : each.stop * unit]
    return whole


def _in(batch: Batch, dtype: torch.dtype) -> Batch:
    """A copy, whose floating-point numbers are of ``dtype``."""

    def converted(each: Tensor) -> Tensor:
        return each.to(torch.float64, copy=True) if each.is_floating_point() and dtype is torch.float64 else each.clone()

    return batch.mapped(lambda part: mapped(part, converted))
