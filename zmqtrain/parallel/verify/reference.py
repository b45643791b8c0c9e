"""What the ordinary model gives: one process of a host runs it, and tells each of the others what belongs to its part.

The ordinary model's memory is given back before the divided one computes, and of its gradients there are never more than some
megabytes: each is sent, and forgotten, while the backward goes on. So this process needs the memory of one model in double
precision for the time, and the others nothing but their parts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from zmqtrain.data.batch import Batch
from zmqtrain.data.draws import not_drawing
from zmqtrain.data.nested import mapped
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.placed.model import ParallelModel, map_tensors
from zmqtrain.parallel.placement import Range
from zmqtrain.parallel.verify.case import (
    OPTIMIZER_STEPS,
    Case,
    NotInDouble,
    NotSmaller,
    Phase,
    What,
    When,
    alone,
    is_pair,
    mean,
    multiply_weights,
    source_of,
    without_own_dropout,
)
from zmqtrain.parallel.verify.in_double import staying_in
from zmqtrain.parallel.verify.line import Line
from zmqtrain.parallel.verify.ordinary import backward_within, drawing_alike
from zmqtrain.parallel.verify.sketch import pattern, sketch
from zmqtrain.parallel.verify.smaller import Parts, Sizes, cropped, sizes_of
from zmqtrain.parallel.verify.tolerance import distance, largest
from zmqtrain.parallel.verify.watch import Watch, watching
from zmqtrain.processors import processors

#: Gradients that wait to be sent together.
_TOGETHER_BYTES = 8 << 20
OwnChange: TypeAlias = Mapping[tuple[What, str], float]


@dataclass(frozen=True, slots=True)
class Part:
    """What a process holds of a parameter or buffer."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dimension: int | None
    ranges: tuple[Range, ...]

    def pattern(self, seed: int) -> Tensor:
        """This part of the tensor that `zmqtrain.parallel.verify.sketch.pattern` gives."""
        return pattern(self.shape, seed, self.dimension, self.ranges)

    def of(self, whole: Tensor) -> Tensor:
        """This part of a tensor, a view of it where it is in one piece; all of one of another shape."""
        if self.dimension is None or tuple(whole.shape) != self.shape:
            return whole
        if len(self.ranges) == 1:
            ((start, stop),) = self.ranges
            return whole.narrow(self.dimension, start, stop - start)
        return torch.cat([whole.narrow(self.dimension, start, stop - start) for start, stop in self.ranges], self.dimension)


@dataclass(frozen=True, slots=True)
class Needs:
    """Which part of which tensors a process needs, by the tensors' names."""

    parameters: Mapping[str, Part]
    buffers: Mapping[str, Part]

    @classmethod
    def of_model(cls, divided: ParallelModel) -> Needs:
        """The parts of all parameters and buffers that this process has of a divided model."""
        shards, rank = divided.shards_by_name(), divided.fabric.rank

        def part(name: str, tensor: Tensor) -> Part:
            shard = shards.get(name)
            if shard is None or shard.dimension is None:
                return Part(tuple(tensor.shape), None, ())
            ranges = shard.pieces[shard.members.index(rank)]
            if ranges == ((0, shard.shape[shard.dimension]),):
                return Part(shard.shape, None, ())
            return Part(shard.shape, shard.dimension, ranges)

        return cls(
            {name: part(name, each) for name, each in divided.named_parameters()},
            {name: part(name, each) for name, each in divided.named_buffers()},
        )

    def to_json(self) -> Any:
        """Encode it as JSON values, for `from_json`."""
        return [{name: (each.shape, each.dimension, each.ranges) for name, each in kind.items()} for kind in self._kinds]

    @classmethod
    def from_json(cls, value: Any) -> Needs:
        """Decode what `to_json` returned."""

        def parts(kind: Mapping[str, Any]) -> dict[str, Part]:
            return {
                name: Part(tuple(shape), dimension, tuple((start, stop) for start, stop in ranges))
                for name, (shape, dimension, ranges) in kind.items()
            }

        return cls(*map(parts, value))

    @property
    def _kinds(self) -> tuple[Mapping[str, Part], Mapping[str, Part]]:
        return self.parameters, self.buffers


@dataclass(frozen=True, slots=True)
class Update:
    """The value of a parameter after a step of the optimizer with a known gradient."""

    seed: int
    """The seed from which `pattern` makes the gradient."""
    after: Tensor
    """`sketch` of the part."""
    largest: float
    """Element of the whole, before."""
    step: float
    """The largest change of an element."""


@dataclass(slots=True)
class Wanted:
    """What a process should find: its part of what the ordinary model gives."""

    outputs: dict[When, list[Tensor]] = field(default_factory=dict)
    """Whole."""
    loss: float = 0.0
    weights: dict[When, float | None] = field(default_factory=dict)
    """By which the loss's sum is divided, if it is (sum, weight)."""
    order: Mapping[str, int] = field(default_factory=dict)
    """By module: the number of its first call."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """`sketch` of each part."""
    buffers: dict[When, dict[str, Tensor]] = field(default_factory=dict)
    parameters: dict[When, dict[str, Tensor]] = field(default_factory=dict)
    """`sketch` of each part of those that a forward has changed, as a moving average of another model does."""
    updates: dict[str, Update] = field(default_factory=dict)
    """One for each kind of parameter that is divided."""
    largest: dict[tuple[What, str], float] = field(default_factory=dict)
    """Element of whole gradients, and of buffers at first."""
    sizes: Sizes = field(default_factory=dict)
    """The parts of images that were computed."""

    def take(self, what: str, about: Any, tensors: Sequence[Tensor]) -> None:
        """What the process that runs the ordinary model tells."""
        if what == "sizes":
            self.sizes = {(whole[0], whole[1]): (part[0], part[1]) for whole, part in about}
        elif what == "outputs":
            when, loss, weight, order = about
            self.outputs[when], self.weights[when] = list(tensors), weight
            if when == "first":
                self.loss, self.order = loss, order
        elif what == "gradients":
            for (name, of), part in zip(about, tensors, strict=True):
                # A parameter's gradient may come in several summands, where a part of the forward is computed again.
                self.gradients[name] = self.gradients[name] + part if name in self.gradients else part
                self.largest["gradient", name] = max(of, self.largest.get(("gradient", name), 0.0))
        elif what == "buffers":
            when, names = about
            self.buffers[when] = {name: part for (name, _), part in zip(names, tensors, strict=True)}
            self.largest |= {("buffer", name): of for name, of in names if when == "first"}
        elif what == "parameters":
            when, names = about
            self.parameters[when] = {name: part for (name, _), part in zip(names, tensors, strict=True)}
            self.largest |= {("parameter", name): of for name, of in names}
        else:
            name, of, step, seed = about
            self.updates[name] = Update(seed, tensors[0], of, step)


def wanted(
    case: Case, batch: Batch, fabric: Fabric, needs: Needs, parts: Parts, watch: Watch | None, meanwhile: Callable[[], None]
) -> Wanted:
    """Run the ordinary model, or be told what another process has found. All processes must call it.

    ``parts``: of images. ``meanwhile``: what is to be done once needs are known; before anything is told, while the other process
    has its model made, and otherwise when that one's memory has been given back.

    Raises `NotInDouble` and `NotSmaller` on all processes, and what the ordinary model raises, on those that do not run it as
    `RuntimeError`."""
    source, line, served = _line(case, fabric)
    if source != fabric.rank:
        line.send(source, needs.to_json())
        meanwhile()
        found = Wanted()
        while True:
            (what, about), tensors = line.receive(source)
            if what == "end":
                _raise(about, source)
                return found
            found.take(what, about, tensors)
    told = {rank: Needs.from_json(line.receive(rank)[0]) for rank in served}
    serving = _Serving(case, line, told, needs)
    reason, error = "", None
    try:
        with _threads_of(1 + len(served)):
            _Ordinary(case, batch, serving, watch, parts).run()
    except Exception as raised:  # noqa: BLE001 - all must hear of it
        error = raised
        in_vain = case.dtype is torch.float64 and isinstance(error, RuntimeError | TypeError | ValueError)
        reason = _NOT_IN_DOUBLE if in_vain else f"{type(error).__name__}: {error}"
        if isinstance(error, UsageError | TaskError):
            reason = f"{_REFUSED if isinstance(error, UsageError) else _NO_TASK}{error}"
        elif serving.own.sizes:
            reason = _NOT_SMALLER
    for rank in served:
        line.send(rank, ["end", reason])
    if reason in _AGAIN:
        raise _AGAIN[reason] from error
    if error is not None:
        raise error
    meanwhile()
    return serving.own


@contextmanager
def _threads_of(processes: int) -> Iterator[None]:
    """Use torch's threads of all these processes of a host, who wait meanwhile, as far as there are processors for them."""
    own = torch.get_num_threads()
    torch.set_num_threads(max(own, min(own * processes, processors())))
    try:
        yield
    finally:
        torch.set_num_threads(own)


def own_change(case: Case, batch: Batch, fabric: Fabric) -> OwnChange:
    """What becomes of the ordinary model's own numbers where weights and inputs change by a ten-millionth. All processes must call
    it."""
    source, line, served = _line(case, fabric)
    if source != fabric.rank:
        (found,), _ = line.receive(source)
        return {(what, name): by for what, name, by in found}
    with _threads_of(1 + len(served)):
        own = _own_change(case, batch)
    for rank in served:
        line.send(rank, [[(what, name, by) for (what, name), by in own.items()]])
    return own


_NOT_IN_DOUBLE, _NOT_SMALLER = "not in double precision", "not on parts of images"
_AGAIN = {_NOT_IN_DOUBLE: NotInDouble, _NOT_SMALLER: NotSmaller}
_REFUSED, _NO_TASK = "refused: ", "not a task's: "


def _line(case: Case, fabric: Fabric) -> tuple[int, Line, list[int]]:
    """The rank that runs the ordinary model for this one, the way to it, and the others that it does so for."""
    source = source_of(case.references, fabric.rank)
    ranks = tuple(rank for rank in range(fabric.size) if source_of(case.references, rank) == source)
    return source, Line(fabric, ranks), [rank for rank in ranks if rank != source]


def _raise(reason: str, source: int) -> None:
    if reason in _AGAIN:
        raise _AGAIN[reason]
    if reason.startswith(_REFUSED):
        raise UsageError(reason.removeprefix(_REFUSED))
    if reason.startswith(_NO_TASK):
        raise TaskError(reason.removeprefix(_NO_TASK))
    if reason:
        raise RuntimeError(f"the ordinary model, which the worker of rank {source} runs for this one, raised {reason}")


class _Serving:
    """Gives each process its part."""

    def __init__(self, case: Case, line: Line, told: Mapping[int, Needs], needs: Needs) -> None:
        self._line, self._told, self._needs = line, told, needs
        self.own = Wanted()
        self._gradients: list[tuple[str, Tensor]] = []

    @property
    def all_needs(self) -> list[Needs]:
        """The needs of this process, and of every process that it serves."""
        return [self._needs, *self._told.values()]

    def tell(self, what: str, about: Any, parts: Callable[[Needs], list[Tensor]]) -> None:
        """Everyone, ``parts`` of what it needs."""
        for rank, needs in self._told.items():
            self._line.send(rank, [what, about], parts(needs))
        self.own.take(what, about, [each.detach() for each in parts(self._needs)])

    def gradient(self, name: str, whole: Tensor) -> None:
        """Take a parameter's gradient, which is sent now or with the next ones."""
        self._gradients.append((name, whole))
        if sum(each.nbytes for _, each in self._gradients) >= _TOGETHER_BYTES:
            self.gradients_end()

    def gradients_end(self) -> None:
        """Send the gradients that are collected but not sent yet."""
        found, self._gradients = self._gradients, []
        if found:
            about = [(name, largest(whole)) for name, whole in found]
            self.tell("gradients", about, _sketches(found))

    def buffers(self, model: nn.Module, when: When) -> None:
        """All of a model's, as they are now."""
        found = [(name, each.detach()) for name, each in model.named_buffers()]
        everything = Part((), None, ())
        about = [when, [(name, largest(each)) for name, each in found]]
        self.tell("buffers", about, lambda needs: [needs.buffers.get(name, everything).of(each).clone() for name, each in found])

    def parameters(self, names: Mapping[nn.Parameter, str], before: Sequence[Tensor], when: When) -> None:
        """Take a model's parameters that are no longer as they were ``before``."""
        changed = [
            (name, each.detach()) for (each, name), was in zip(names.items(), before, strict=True) if distance(sketch(each), was)
        ]
        about = [when, [(name, largest(each)) for name, each in changed]]
        self.tell("parameters", about, _sketches(changed))


def _sketches(wholes: Sequence[tuple[str, Tensor]]) -> Callable[[Needs], list[Tensor]]:
    """Those of a process's parts of some parameters, or of what is like these. Processes with the same part get the same one."""
    known: dict[tuple[str, Part], Tensor] = {}

    def of(needs: Needs, name: str, whole: Tensor) -> Tensor:
        part = needs.parameters[name]
        if (name, part) not in known:
            known[name, part] = sketch(part.of(whole)).clone()
        return known[name, part]

    return lambda needs: [of(needs, name, whole) for name, whole in wholes]


class _Ordinary:
    def __init__(self, case: Case, batch: Batch, serving: _Serving, watch: Watch | None, parts: Parts) -> None:
        self._case, self._batch, self._serving, self._watch, self._parts = case, batch, serving, watch, parts
        self._reached: set[str] = set()

    def run(self) -> None:
        case, serving, phase = self._case, self._serving, self._case.phase
        model = made(case)
        sizes = sizes_of(case, model, self._batch, self._parts)
        self._batch = cropped(self._batch, sizes)
        serving.tell("sizes", list(sizes.items()), lambda _: [])
        names = self._names(model)
        for parameter, name in names.items():
            if parameter.requires_grad:
                self._sent_when_ready(parameter, name)
        before = [sketch(each).clone() for each in names]
        with watching(self._watch, model, phase):
            outcome = forward(case, model, self._batch, phase, backward=True)
        serving.gradients_end()
        serving.tell("outputs", ["first", outcome.loss, outcome.weight, dict(outcome.order)], lambda _: outcome.outputs)
        serving.buffers(model, "first")
        serving.parameters(names, before, "first")
        multiply_weights(model)
        before = [sketch(each).clone() for each in names]
        with torch.no_grad(), watching(self._watch, model, "evaluation"):
            later = forward(case, model, self._batch, "evaluation")
        serving.tell("outputs", ["later", later.loss, later.weight, {}], lambda _: later.outputs)
        serving.buffers(model, "later")
        serving.parameters(names, before, "later")
        if case.optimizer is not None:
            self._updates(model, names)

    def _names(self, model: nn.Module) -> dict[nn.Parameter, str]:
        """Each parameter's name in the divided model: of several, it may be another than here."""
        needed = self._serving.all_needs[0].parameters
        found: dict[nn.Parameter, str] = {}
        for name, each in model.named_parameters(remove_duplicate=False):
            if name in needed:
                found.setdefault(each, name)
        return found

    def _sent_when_ready(self, parameter: nn.Parameter, name: str) -> None:
        def ready(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                self._reached.add(name)
                self._serving.gradient(name, gradient.to_dense() if gradient.layout is not torch.strided else gradient)

        parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]

    def _updates(self, model: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
        """What the optimizer makes of a small and of a large parameter of each kind: of as many dimensions, divided along the same
        one, in the same of its groups. An optimizer may treat large ones in another way than small ones.

        One after another, whose state is thrown away at once: an optimizer's state of a model is larger than the model. What is not
        divided is updated alike everywhere."""
        assert self._case.optimizer is not None
        optimizer, needs = self._case.optimizer(model), self._serving.all_needs
        group = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
        kinds: dict[Any, list[nn.Parameter]] = {}
        for parameter, name in names.items():
            divided = tuple(each.parameters[name].dimension for each in needs)
            if name in self._reached and any(each is not None for each in divided):
                kinds.setdefault((group.get(id(parameter)), parameter.dtype, parameter.dim(), divided), []).append(parameter)
        chosen = {end(each, key=nn.Parameter.numel): None for each in kinds.values() for end in (min, max)}
        for seed, parameter in enumerate(chosen):
            name, before = names[parameter], parameter.detach().clone()
            updated(optimizer, parameter, pattern(parameter.shape, seed).to(parameter.device, parameter.dtype))
            after = parameter.detach()
            about = [name, largest(after), largest(after - before), seed]
            self._serving.tell("update", about, lambda each: [sketch(each.parameters[name].of(after))])  # noqa: B023


def updated(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradient: Tensor) -> None:
    """Some steps of the optimizer with this gradient alone, after which the parameter has no state."""
    parameter.grad = gradient
    for _ in range(OPTIMIZER_STEPS):
        optimizer.step()
    optimizer.state.pop(parameter, None)
    parameter.grad = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the ordinary model's forward."""

    outputs: list[Tensor]
    loss: float
    weight: float | None
    """By which the loss's sum is divided, if it is (sum, weight)."""
    order: Mapping[str, int]
    """By module: the number of its first call."""


def made(case: Case) -> nn.Module:
    """An ordinary model, in the precision of the comparison."""
    with alone():
        model = case.make()
        without_own_dropout(model)
        return model.to(case.dtype) if case.dtype is torch.float64 else model


def forward(case: Case, model: nn.Module, batch: Batch, phase: Phase, *, backward: bool = False) -> Outcome:
    """Run the ordinary model's forward in a phase. ``backward``: also compute its gradients."""
    model.train(phase == "training")
    with alone(), staying_in(case.dtype), drawing_alike(model, case.seed, 0 if phase == "training" else 1) as order:
        with not_drawing():
            before = random.getstate(), np.random.get_state()
            output = batch.output(model)
            drawn = random.getstate() != before[0] or not _same_state(np.random.get_state(), before[1])
        if drawn:
            raise UsageError(
                "the model's forward draws from the random numbers of Python or numpy, which are others on each worker, and the "
                "model is divided: draw from torch's (torch.rand(()).item()), which are the same on all"
            )
        outputs = [each.detach().clone() for each in tensors_of(output)]
        measured = case.loss(output, batch.target)
        loss, weight = mean(measured, trained=backward), float(measured[1]) if is_pair(measured) else None
        if backward:
            backward_within(loss)
    return Outcome(outputs, float(loss.detach()), weight, order)


def _same_state(one: Any, other: Any) -> bool:
    """Whether two states of numpy's global generator are the same."""
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of numbers in a model's output, in a fixed order."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


def _own_change(case: Case, batch: Batch) -> OwnChange:
    """One after another: of the first model the numbers are kept."""
    kept: dict[tuple[What, str], Tensor] = {}
    found: dict[tuple[What, str], float] = {}
    for perturbed in (False, True):
        with alone(), torch.enable_grad():
            model, given = made(case), batch
            if perturbed:
                given = _perturb(model, batch)
            outcome = forward(case, model, given, case.phase, backward=True)
            numbers: dict[tuple[What, str], Tensor] = {
                ("gradient", name): sketch(each.grad) for name, each in model.named_parameters() if each.grad is not None
            }
            numbers |= {("buffer", name): each for name, each in model.named_buffers()}
            numbers |= {("parameter", name): sketch(each).clone() for name, each in model.named_parameters()}
            with torch.no_grad():
                second = forward(case, model, given, "evaluation")
            for number, (one, other) in enumerate(zip(outcome.outputs, second.outputs, strict=False)):
                numbers["output", str(number)] = torch.cat([one.flatten(), other.flatten()])
            numbers["loss", ""] = torch.tensor([outcome.loss, second.loss], dtype=torch.float64)
        if perturbed:
            found = {key: distance(numbers[key], each) for key, each in kept.items() if key in numbers}
        kept = numbers
    return found


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
