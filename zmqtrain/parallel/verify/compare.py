"""One small batch through the divided model and the ordinary one: outputs, loss, gradients, buffers, and a step of the optimizer.

Every process runs the ordinary model on all samples, and compares its own part: nothing is gathered but a few numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.data.batch import Batch
from zmqtrain.data.nested import mapped
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.placed.model import ParallelModel, map_tensors
from zmqtrain.parallel.placed.tensor import Placed
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.parallel.turns import turn
from zmqtrain.parallel.verify.ordinary import drawing_alike
from zmqtrain.parallel.verify.tolerance import Tolerance, largest
from zmqtrain.parallel.verify.watch import Watch, block_of

Phase = Literal["training", "evaluation"]
What = Literal["output", "loss", "gradient", "buffer", "update"]
#: An optimizer that shows what it does to parts in its second step shows it here: preconditioners often begin with the second.
OPTIMIZER_STEPS = 2


class Shared(Protocol):
    """What this process does with its column's samples, as `zmqtrain.train.divided.DividedShare` does in training."""

    def begin(self, step: int, micro_batch: int, micro_batches: int) -> None: ...
    def of_output(self, batch: Batch) -> Batch: ...
    def loss(self, measure: Callable[[Any, Any], Any], output: Any, target: Any) -> Any: ...


class NotInDouble(Exception):
    """The ordinary model does not run in double precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is to be compared."""

    make: Callable[[], nn.Module]
    """Makes the ordinary model: an equal one at each call."""
    divide: Callable[[nn.Module], ParallelModel]
    batch: Batch
    """All samples, equal on all processes."""
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[nn.Module], Optimizer] | None
    share: Callable[[ParallelModel, int], Shared]
    seed: int
    local_statistics: bool
    """Batch norm sees a process's own samples, so that only evaluation can be compared."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as in the ordinary model."""

    phase: Phase
    what: What
    name: str
    """Of a parameter, a buffer, or the number of an output."""
    by: float
    """The largest difference of an element."""
    of: float
    """The largest element of the ordinary model's."""
    order: int
    """The smaller, the more it says about where it begins."""


@dataclass(slots=True)
class Found:
    """What this process has found."""

    differences: list[Difference] = field(default_factory=list)
    loss: float = 0.0
    """This process's summand of the whole batch's loss, in training."""


@contextmanager
def alone() -> Iterator[None]:
    """No other rank of this process draws random numbers meanwhile, and random states are afterwards what they were."""
    with turn():
        own, numbers = random.getstate(), np.random.get_state()
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        try:
            with torch.random.fork_rng(devices=list(range(torch.cuda.device_count())) if used else []):
                yield
        finally:
            random.setstate(own)
            np.random.set_state(numbers)


def compare(case: Case, watch: Watch | None = None) -> Found:
    """Run both. All processes must call it; each returns what it has found in its own part."""
    return _Comparison(case, watch).run()


def prepared(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """For the comparison: in ``dtype``, and without the dropout within torch's own attention and recurrent layers, which draw by
    themselves."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
    return model.to(dtype) if dtype is torch.float64 else model


def _made(case: Case) -> nn.Module:
    """An ordinary model."""
    with alone():
        return prepared(case.make(), case.dtype)


class _Comparison:
    def __init__(self, case: Case, watch: Watch | None) -> None:
        self._case, self._watch = case, watch
        self._batch = _in(case.batch, case.dtype)
        self._found = Found()

    def run(self) -> Found:
        case = self._case
        first: Phase = "evaluation" if case.local_statistics else "training"
        ordinary, expected = self._ordinary(first)
        divided = case.divide(_made(case))
        with _watching(self._watch, divided, first):
            self._step(divided, expected, first)
        self._gradients(ordinary, divided, first, expected.order)
        self._buffers(ordinary, divided, first)
        if case.optimizer is not None:
            self._update(ordinary, divided, case.optimizer)
        for parameter in (*ordinary.parameters(), *divided.parameters()):
            parameter.grad = None
        with torch.no_grad():
            with _watching(self._watch, ordinary, "evaluation"):
                expected = _ordinary_forward(case, ordinary, self._batch, "evaluation")
            with _watching(self._watch, divided, "evaluation"):
                self._forward(divided, expected, "evaluation")
        self._buffers(ordinary, divided, "evaluation")
        return self._found

    def _ordinary(self, phase: Phase) -> tuple[nn.Module, _Outcome]:
        """The ordinary model, after its step. Raises `NotInDouble`."""
        case = self._case
        try:
            model = _made(case)
            with _watching(self._watch, model, phase):
                return model, _ordinary_step(case, model, self._batch, phase)
        except (RuntimeError, TypeError, ValueError) as error:
            if case.dtype is torch.float64:
                raise NotInDouble from error
            raise

    def _forward(self, model: ParallelModel, expected: _Outcome, phase: Phase) -> Tensor:
        """This process's summand of the loss. Its outputs are compared."""
        case, samples = self._case, self._batch.samples
        model.train(phase == "training")
        share = case.share(model, samples)
        share.begin(0 if phase == "training" else 1, 0, 1)
        start, stop = model.samples(samples)
        own = self._batch.part(slice(start, stop))
        output = own.output(model)
        mine = model.output_range()
        self._outputs(model, output, expected, slice(start + mine.start, start + mine.stop), slice(start, stop), phase)
        part = share.of_output(own)
        if not part.samples:  # others have all of them, and wait for this process's backward
            self._found.loss = 0.0
            return sum((each.sum() for each in tensors_of(output)), torch.zeros(())) * 0.0
        loss = mean(share.loss(case.loss, output, part.target)) * (part.samples / samples)
        if phase == "training" or case.local_statistics:
            copies = 1 if model.output_samples == "all" else model.grid.rows
            self._found.loss = float(loss.detach()) / copies
        return loss

    def _step(self, model: ParallelModel, expected: _Outcome, phase: Phase) -> None:
        self._forward(model, expected, phase).backward()  # type: ignore[no-untyped-call]
        sum_gradients(model, model.fabric, model.shards_by_name())
        tolerance = self._tolerance()
        by, of = self._total(model) - expected.loss, abs(expected.loss)
        if not tolerance.allows("loss", "", abs(by), of):
            self._differs(phase, "loss", "", abs(by), of, 0)

    def _total(self, model: ParallelModel) -> float:
        """The whole batch's loss."""
        fabric = model.fabric
        own = torch.tensor([self._found.loss], dtype=torch.float64)
        return float(fabric.among(tuple(range(fabric.size))).all_reduce(own, Label("", "statistics")).wait()[0])

    def _outputs(self, model: ParallelModel, output: Any, expected: _Outcome, mine: slice, column: slice, phase: Phase) -> None:
        tolerance, found = self._tolerance(), tensors_of(output)
        if len(found) != len(expected.outputs):
            self._differs(phase, "output", "", float("inf"), 0.0, 0)
            return
        for number, (own, whole) in enumerate(zip(found, expected.outputs, strict=True)):
            part = part_of(model, own, whole, (mine, column), self._batch.samples)
            by, of = distance(own.local if isinstance(own, Placed) else own, part), largest(whole)
            if not tolerance.allows("output", str(number), by, of):
                self._differs(phase, "output", str(number), by, of, number)

    def _gradients(self, ordinary: nn.Module, divided: ParallelModel, phase: Phase, called: Mapping[str, int]) -> None:
        tolerance, shards = self._tolerance(), divided.shards_by_name()
        whole = dict(ordinary.named_parameters())
        most = max((largest(each.grad) for each in whole.values() if each.grad is not None), default=0.0)
        for number, (name, parameter) in enumerate(divided.named_parameters()):
            if not parameter.requires_grad or not parameter.numel():
                continue
            wanted, shard = whole[name].grad, shards[name]
            order = -called.get(name.rpartition(".")[0], 0) * len(whole) - number  # backward begins with the last ones
            if wanted is None or parameter.grad is None:
                if (wanted is None) != (parameter.grad is None):
                    self._differs(phase, "gradient", name, float("inf"), 0.0, order)
                continue
            part = shard.cut(wanted, shard.members.index(divided.fabric.rank))
            by, of = distance(parameter.grad, part), largest(wanted)
            parameter.grad = None
            if not tolerance.allows("gradient", name, by, of, floor=most):
                self._differs(phase, "gradient", name, by, of, order)

    def _buffers(self, ordinary: nn.Module, divided: ParallelModel, phase: Phase) -> None:
        tolerance, shards = self._tolerance(), divided.shards_by_name()
        whole, found = dict(ordinary.named_buffers()), dict(divided.named_buffers())
        for number, name in enumerate(whole.keys() | found.keys()):
            if name not in whole or name not in found:
                self._differs(phase, "buffer", name, float("inf"), 0.0, number)
                continue
            wanted, shard = whole[name].detach(), shards.get(name)
            if shard is not None and shard.shape == tuple(wanted.shape):
                wanted = shard.cut(wanted, shard.members.index(divided.fabric.rank))
            by, of = distance(found[name], wanted), largest(whole[name])
            if not tolerance.allows("buffer", name, by, of):
                self._differs(phase, "buffer", name, by, of, number)

    def _update(self, ordinary: nn.Module, divided: ParallelModel, make: Callable[[nn.Module], Optimizer]) -> None:
        """The same gradients on both sides, so that all that differs is the optimizer's: where one's sign decides, noise would.

        One parameter after another, whose state is thrown away at once: an optimizer's state of a model is larger than the model.
        """
        shards, whole = divided.shards_by_name(), dict(ordinary.named_parameters())
        gradients = {name: parameter.grad for name, parameter in whole.items()}
        for parameter in (*whole.values(), *divided.parameters()):
            parameter.grad = None
        optimizers = make(ordinary), make(divided)
        for number, (name, parameter) in enumerate(divided.named_parameters()):
            one, gradient = whole[name], gradients.pop(name)
            if gradient is None:
                continue
            row = shards[name].members.index(divided.fabric.rank)
            before = parameter.detach().clone()
            one.grad, parameter.grad = gradient, shards[name].cut(gradient, row).to(parameter.dtype)
            del gradient
            for optimizer in optimizers:
                for _ in range(OPTIMIZER_STEPS):
                    optimizer.step()
            for optimizer, each in zip(optimizers, (one, parameter), strict=True):
                optimizer.state.pop(each, None)
                each.grad = None
            if parameter.requires_grad and parameter.numel():
                self._updated(name, number, parameter, shards[name].cut(one, row), before, largest(one))

    def _updated(self, name: str, number: int, found: Tensor, wanted: Tensor, before: Tensor, of: float) -> None:
        exact = self._case.dtype is torch.float64
        step, by = largest(wanted - before), distance(found, wanted)
        rounding = of * (1e-14 if exact else 1e-6)
        if not by <= (1e-6 if exact else 1e-3) * step + rounding:
            self._differs("training", "update", name, by, step, number)

    def _differs(self, phase: Phase, what: What, name: str, by: float, of: float, order: int) -> None:
        self._found.differences.append(Difference(phase, what, name, by, of, order))

    _own_change: Tolerance | None = None

    def _tolerance(self) -> Tolerance:
        """How far the two may be apart."""
        if self._own_change is None:
            self._own_change = Tolerance(self._case.dtype, lambda: _own_change(self._case, self._batch))
        return self._own_change


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Of the ordinary model's forward."""

    outputs: list[Tensor]
    loss: float
    order: Mapping[str, int]
    """Of modules: the number of the first call."""


def _ordinary_forward(case: Case, model: nn.Module, batch: Batch, phase: Phase, *, backward: bool = False) -> _Outcome:
    model.train(phase == "training")
    with alone(), drawing_alike(model, case.seed, 0 if phase == "training" else 1) as order:
        output = batch.output(model)
        outputs = [each.detach().clone() for each in tensors_of(output)]
        loss = mean(case.loss(output, batch.target))
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
    return _Outcome(outputs, float(loss.detach()), order)


def _ordinary_step(case: Case, model: nn.Module, batch: Batch, phase: Phase) -> _Outcome:
    return _ordinary_forward(case, model, batch, phase, backward=True)


def _own_change(case: Case, batch: Batch) -> Mapping[tuple[What, str], float]:
    """What becomes of the ordinary model's own numbers where weights and inputs change by a ten-millionth."""
    first: Phase = "evaluation" if case.local_statistics else "training"
    numbers: list[dict[tuple[What, str], Tensor]] = []
    for perturbed in (False, True):
        with alone(), torch.enable_grad():
            model, given = _made(case), batch
            if perturbed:
                given = _perturb(model, batch)
            kept: dict[tuple[What, str], Tensor] = {}
            outcome = _ordinary_step(case, model, given, first)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    kept["gradient", name] = parameter.grad
            for name, buffer in model.named_buffers():
                kept["buffer", name] = buffer
            with torch.no_grad():
                second = _ordinary_forward(case, model, given, "evaluation")
            for number, (one, other) in enumerate(zip(outcome.outputs, second.outputs, strict=False)):
                kept["output", str(number)] = torch.cat([one.flatten(), other.flatten()])
            kept["loss", ""] = torch.tensor([outcome.loss, second.loss], dtype=torch.float64)
            numbers.append(kept)
    return {key: distance(numbers[1][key], each) for key, each in numbers[0].items() if key in numbers[1]}


def _perturb(model: nn.Module, batch: Batch) -> Batch:
    """Change the weights a little. Returns the batch, whose inputs are changed a little."""
    generator = torch.Generator().manual_seed(11)

    def changed(each: Tensor) -> Tensor:
        return each * _near_one(each, generator) if each.is_floating_point() else each

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(_near_one(parameter, generator))
    return batch.with_inputs(lambda part: mapped(part, changed))


def _near_one(like: Tensor, generator: torch.Generator) -> Tensor:
    return (1 + 1e-7 * torch.randn(like.shape, generator=generator, dtype=torch.float64)).to(like.device, like.dtype)


def mean(loss: Any) -> Tensor:
    """A task's loss as one number, where it may be (sum, weight)."""
    if isinstance(loss, tuple | list) and len(loss) == 2:
        total, weight = loss
        return total / weight  # type: ignore[no-any-return]
    assert isinstance(loss, Tensor)
    return loss.reshape(())


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of numbers in a model's output, in a fixed order."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
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


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of an element; infinite where they cannot be compared. What is NaN in both is alike."""
    one, other = one.detach(), other.detach()
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return float((one.to(torch.float64) - other.to(torch.float64)).abs().max())
    apart = float(torch.linalg.vector_norm(one - other, float("inf")))
    if apart < float("inf"):
        return apart
    difference = torch.where(one == other, 0, one - other).abs().to(torch.float64)
    difference = torch.where(one.isnan() & other.isnan(), 0.0, difference)
    by = float(difference.max())
    return by if by == by else float("inf")


def _in(batch: Batch, dtype: torch.dtype) -> Batch:
    """A copy, whose floating-point numbers are of ``dtype``."""

    def converted(each: Tensor) -> Tensor:
        return each.to(torch.float64, copy=True) if each.is_floating_point() and dtype is torch.float64 else each.clone()

    return batch.mapped(lambda part: mapped(part, converted))


@contextmanager
def _watching(watch: Watch | None, model: nn.Module, phase: Phase) -> Iterator[None]:
    if watch is None:
        yield
        return
    with watch.over(model, phase):
        yield
