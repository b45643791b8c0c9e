"""Losses whose mean is weighted: class weights, targets that do not count, tokens.

The weighted mean over a batch is not the mean of the means over its parts. So the loss is a pair, (sum, weight), and the gradient
of a step is that of all workers' sums, divided by all workers' weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.data.batch import TARGETS, Batch
from zmqtrain.data.bridge import Bridge
from zmqtrain.data.nested import leaves, mapped, rows
from zmqtrain.errors import TaskError
from zmqtrain.parallel.turns import generators_kept
from zmqtrain.train.loss_graph import leaves_of, nodes_of, not_a_mean
from zmqtrain.train.loss_sums import summed
from zmqtrain.train.loss_trial import Constants, constants_of
from zmqtrain.wire.tensor import TensorPayload

#: The class that torch's losses ignore by default.
IGNORED = -100
#: In how many micro-batches, the first ones, a loss is tried on halves.
LOSSES_TRIED = 3
#: The losses that are a sum divided by a sum of weights.
WEIGHTED = "Task.loss is a pair (sum, weight), which torch's cross-entropy with class weights or an ignore_index is, too"
#: torch's losses with class weights, and the modules that call them.
_FUNCTIONS = {functional.cross_entropy: nn.CrossEntropyLoss, functional.nll_loss: nn.NLLLoss}


class ClassWeighted:
    """A cross-entropy or negative log-likelihood that returns (sum, weight), each a tensor of one element."""

    def __init__(self, module: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        self._module = module

    def __call__(self, output: Any, target: Any) -> Any:
        module = self._module
        if target.is_floating_point():  # for probabilities torch computes the plain mean
            return module(output, target)
        weight = None if module.weight is None else module.weight.to(output.device)
        how: dict[str, Any] = {"weight": weight, "ignore_index": module.ignore_index, "reduction": "sum"}
        if isinstance(module, nn.CrossEntropyLoss):
            total = functional.cross_entropy(output, target, label_smoothing=module.label_smoothing, **how)
        else:
            total = functional.nll_loss(output, target, **how)
        counted = target[target != module.ignore_index]
        return total, counted.numel() if weight is None else weight[counted].sum()


def taken_apart(loss: Any, *, plain: bool = False) -> Any:
    """The loss as one that returns (sum, weight), if it is torch's with class weights or an ``ignore_index``; otherwise
    unchanged. ``plain``: also if it has neither, since it leaves out targets of `IGNORED`."""
    module = _module(loss)
    if module is None or module.reduction != "mean":
        return loss
    explicit = isinstance(loss, partial) and "ignore_index" in loss.keywords
    asked = module.weight is not None or module.ignore_index != IGNORED or explicit
    return ClassWeighted(module) if asked or plain else loss


def ignores(loss: Any) -> bool:
    """Whether the loss is one of torch's means that silently leaves out targets of `IGNORED`."""
    module = _module(loss)
    return module is not None and module.reduction == "mean"


def require_none_ignored(target: Any) -> None:
    """Raise `TaskError` if there are targets that a plain mean leaves out."""
    if _ignored(target):
        raise TaskError(
            f"some targets are {IGNORED}, which the loss leaves out, so workers with more of them would count too much. Pass "
            f"functools.partial(torch.nn.functional.cross_entropy, ignore_index={IGNORED}), or a loss that returns (sum, weight)"
        )


def require_none_ignored_by_model(batch: Any) -> None:
    """The same for a loss that the model computes of the batch, a mapping."""
    if (key := ignored_by_model(batch)) is not None:
        raise TaskError(
            f"some of {key!r} are {IGNORED}, which a model that computes its loss leaves out, so workers with more of them would "
            "count too much. Let Task.loss return the pair (loss * n, n), with the number n of those that count: n = "
            f"(batch[{key!r}] != {IGNORED}).sum(), and of a causal language model (batch[{key!r}][:, 1:] != {IGNORED}).sum()"
        )


def ignored_by_model(batch: Any) -> str | None:
    """The key of targets, in a batch that is a mapping, of which some are `IGNORED`; ``None`` if there are none."""
    found = [key for key in TARGETS if isinstance(batch, Mapping) and key in batch and _ignored(batch[key])]
    return found[0] if found else None


def _ignored(target: Any) -> bool:
    return isinstance(target, Tensor) and not target.is_floating_point() and bool((target == IGNORED).any())


def require_mean(loss: Callable[[Any, Any], Any], output: Any, target: Any, samples: int, value: Tensor) -> bool:
    """Raise `TaskError` if ``value``, the loss of a worker's samples, is not the mean of the losses of their halves.

    Returns whether the loss looks at the samples that it is given; one that the model has computed itself does not. See
    `tried_on_halves`."""
    found = tried_on_halves(loss, output, target, samples, value)
    if found is None:
        return True
    if not found.mean:
        raise TaskError(
            f"Task.loss(output, target) is not a mean over samples: {found} The samples of a step are divided, and the mean of the "
            "parts' losses would be another loss. Return the pair (sum, weight), or pass torch's CrossEntropyLoss or NLLLoss "
            "itself; if each part's own loss is meant, like a contrastive one, return (loss * n, n) for n samples"
        )
    return not found.alike


def require_weight(loss: Callable[[Any, Any], Any], output: Any, target: Any, samples: int, weight: Tensor | float) -> None:
    """Raise `TaskError` if ``weight``, the second value of the pair that the loss has returned, is no weight of the samples.

    A loss that returns its value and another figure would be divided by that figure."""
    found = tried_on_halves(loss, output, target, samples, weight, of=weight_of) if samples > 1 else None
    if found is not None and not found.adds_up:
        raise TaskError(
            "the second value of the pair that Task.loss(output, target) has returned is no weight of its samples: "
            f"it is {found.whole:.6g} for {samples} samples, and {found.first:.6g} and {found.second:.6g} for their halves, which "
            "do not add up. A pair is (sum, weight): the loss is sum / weight. Return the loss alone; other figures belong in "
            "Task.metrics"
        )


def require_mean_on_grid(loss: Tensor, samples: int, before: Constants | None, *, read: bool) -> Constants:
    """Raise `TaskError` if a loss that a divided model computes is no mean over samples, as far as its operations show it.

    ``samples``: those of which the model computes it, though not all of the step's. ``before``: what this returned for the batch
    before. ``read``: as for `constants_of`."""
    how = "return the pair (loss * n, n) from Task.loss, with the number n that count, or use one group without micro-batches"
    if why := not_a_mean(loss, inside=samples) or summed(loss, (), (), read=read, inside=samples):
        raise TaskError(f"the loss that the model computes is not a mean over samples: {why} In a task, {how}")
    constants = Constants()
    constants.add(constants_of(loss, None, read=read, counted=True, inside=samples))
    if before is not None and before.kinds == constants.kinds and abs(before.value - constants.value) > 1e-5 * abs(before.value):
        raise TaskError(
            "the loss that the model computes is not a mean over samples: what it divides by, over how many elements it is a mean, "
            "or what it multiplies a mean by, is not the same for two batches, so the model computes it of the batch (a mask, "
            f"targets that count, the load of experts), and each group has its own: {how}"
        )
    return constants


def require_same_counts(before: list[tuple[str, float]], now: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Raise `TaskError` if a loss is a mean over other numbers of elements for each sample than ``before``, for as many samples
    (the first entry). Returns those of ``now``.

    It is then a mean over all tokens or pixels of a batch, and each worker's batch is as long as its own longest sample."""
    if [kind for kind, _ in before] != [kind for kind, _ in now] or before[:1] != now[:1]:
        return now
    for (_, one), (_, other) in zip(before, now, strict=True):
        if one != other:
            raise TaskError(
                f"the loss is a mean over {other:g} elements of {before[0][1]:g} samples, and of the batch before it over {one:g}: "
                "batches are as long as their own longest sample, so a worker with shorter ones would count each element more. Let "
                "Task.loss return the pair (sum, weight), with the number of elements that count, or the mean over samples of the "
                "mean of each; or let the collate function pad all samples to one length"
            )
    return now


def require_mean_of_model(loss: Callable[[Any, Any], Any], batch: Batch, model: nn.Module, *, itself: bool = True) -> None:
    """Raise `TaskError` if a loss that the model computes ``itself``, or a part of it, is not the mean over samples.

    The model computes halves of the batch in evaluation mode, without a gradient. Its modes, its buffers and torch's random numbers
    stay as they are. Does nothing if the batch cannot be divided, if the model cannot compute a half of it, or if layers use the
    batch's own statistics in evaluation, too."""
    if any(isinstance(module, _NormBase) and module.running_mean is None for module in model.modules()):
        return
    half, modes = batch.samples // 2, [(module, module.training) for module in model.modules()]
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]

    single = False

    def of(part: Batch, measure: Callable[[Any, Any], Any]) -> float:
        nonlocal single
        value = measure(part.output(model), part.target)
        single |= isinstance(value, Tensor) and value.dtype is not torch.float64  # also of a model in double precision
        return float(value)

    model.eval()
    try:
        with torch.no_grad(), generators_kept(_cuda(model)):
            first, second = (of(batch.part(which), _apart(loss)) for which in (slice(0, half), slice(half, batch.samples)))
            copied = _apart(loss)
            found = Halves(batch.samples, half, of(batch, copied), first, second, of(batch, copied))
    except Exception:  # noqa: BLE001 - it has computed the whole batch, and that is all that is asked of it
        return
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, was in kept:
                if not torch.equal(buffer, was):  # backward refuses what it needs if it was written to, also with the same values
                    buffer.copy_(was)
    if found.mean_within(_tolerance_of_model(model, single=single)):
        return
    if not itself:
        raise TaskError(
            "the loss is not a mean over samples, because of what the model computes of all samples together (the balance of "
            f"experts, statistics of a batch): {found} The samples of a step are divided, and the mean of the parts' losses would "
            "be another loss. Compute it for each sample, or leave it out; if each part's own is meant, return the pair "
            "(loss * n, n) for n samples"
        )
    raise TaskError(
        f"the loss that the model computes is not a mean over samples: {found} The samples of a step are divided, and the mean "
        "of the parts' losses would be another loss. Is it a mean over tokens, of which samples have different numbers? Then "
        "return the pair (loss * n, n) from Task.loss, with the number n that count in the batch"
    )


@dataclass(frozen=True, slots=True)
class Halves:
    """What a loss or a metric is of some samples, and of their halves."""

    samples: int
    half: int
    whole: float
    first: float
    second: float
    again: float
    """The value of the whole, computed again: another one if it is random."""
    repeated: float | None = None
    """The value of all samples, if each comes several times."""
    tolerance: float = 1e-7

    @property
    def mean(self) -> bool:
        """Whether the whole is the mean of the halves, or cannot be compared."""
        return self.mean_within(self.tolerance)

    def mean_within(self, tolerance: float) -> bool:
        mean = (self.first * self.half + self.second * (self.samples - self.half)) / self.samples
        if self.again != self.whole or not math.isfinite(self.whole):  # random, or bad for another reason
            return True
        if not math.isfinite(mean):
            return False
        of_halves = abs(mean - self.whole) <= tolerance * max(abs(self.whole), abs(self.first), abs(self.second))
        return of_halves and not self._changes_repeated(tolerance)

    def _changes_repeated(self, tolerance: float) -> bool:
        """Whether the same samples several times make another value."""
        if self.repeated is None:
            return False
        if not math.isfinite(self.repeated):
            return True
        return abs(self.repeated - self.whole) > tolerance * max(abs(self.whole), abs(self.repeated))

    @property
    def adds_up(self) -> bool:
        """Whether the whole is the sum of the halves, or cannot be compared."""
        if self.again != self.whole or not math.isfinite(self.whole):
            return True
        added = self.first + self.second
        return math.isfinite(added) and abs(added - self.whole) <= max(self.tolerance, 1e-5) * max(
            abs(self.whole), abs(self.first), abs(self.second)
        )

    @property
    def alike(self) -> bool:
        """Whether the halves have the value of the whole."""
        return self.half > 0 and self.whole == self.first == self.second

    def __str__(self) -> str:
        if self.repeated is not None and replace(self, repeated=None).mean:
            times = _times(self.samples)
            return (
                f"it is {self.whole:.6g} for {self.samples} samples, but {self.repeated:.6g} if each of them comes {times} times."
            )
        return f"it is {self.whole:.6g} for {self.samples} samples, but {self.first:.6g} and {self.second:.6g} for their halves."


def _times(samples: int) -> int:
    """How often each sample comes in a trial. If it came twice, one sample alone would only have itself to be compared with."""
    return 2 if samples > 2 else 3


def tried_on_halves(
    measure: Callable[[Any, Any], Any],
    output: Any,
    target: Any,
    samples: int,
    value: Any,
    *,
    of: Callable[[Any], Any] = lambda value: value,
) -> Halves | None:
    """The values of a loss or a metric for halves of the samples; ``None`` if it is not known what belongs to which sample, or if
    it cannot be computed of a half, or if it is a pair (sum, weight). ``value``: what it was for all of them. ``of``: the number
    in question of what ``measure`` returns.

    They are computed in float64, where a mean differs from its parts' mean by rounding alone; if ``measure`` does not take that,
    in the types that there are. A copy of ``measure`` is called, so that one that counts its calls does not count these. torch's
    random numbers are drawn again; Python's and NumPy's are not, since the loader's thread may draw some at the same time."""
    device = value.device if isinstance(value, Tensor) else torch.device("cpu")
    half = samples // 2
    every = slice(0, samples)
    parts: list[slice | list[int]] = [slice(0, half) if half else every, slice(half, samples), every, every]
    again_and_again = [*range(samples)] * _times(samples)

    def cut(of_all: tuple[Any, Any], which: slice | list[int]) -> Iterator[Any]:
        output, target = of_all
        # Models return more than a loss looks at: caches, states of all layers, statistics.
        yield rows(output, which, samples, fields=True, lenient=True)
        yield rows(target, which, samples, fields=True)

    def tried(convert: Callable[[Any], Any], *, rounded: bool) -> Halves | None:
        with torch.no_grad(), generators_kept([device] if device.type == "cuda" else ()):
            try:
                copied, converted = _apart(measure), (convert(output), convert(target))
                # What counts its calls is in the same state for each, and in another one for the last.
                copies = (_apart(measure), _apart(measure), copied, copied)
                found = [of(each(*cut(converted, part))) for each, part in zip(copies, parts, strict=True)]
                first, second, whole, again = map(float, found)
            except Exception:  # noqa: BLE001 - a whole batch has given a value, and that is all that is asked of it
                return None
            try:
                repeated = float(of(_apart(measure)(*cut(converted, again_and_again))))
            except Exception:  # noqa: BLE001 - as above
                repeated = None
        return Halves(samples, half, whole, first, second, again, repeated, 5e-2 if rounded else max(map(_tolerance, found)))

    return tried(_in_float64, rounded=False) or tried(lambda part: part, rounded=torch.is_autocast_enabled(device.type))


def _tolerance(value: Any) -> float:
    """How far the mean of two such values may be off by rounding."""
    if not isinstance(value, Tensor):
        return 1e-5
    if not value.is_floating_point() or value.dtype is torch.float64:
        return 1e-7
    return 1e-3 if value.dtype is torch.float32 else 5e-2


def _tolerance_of_model(model: nn.Module, *, single: bool) -> float:
    """How far the mean of losses that a model computes of parts may be off by rounding. ``single``: the losses are in single
    precision."""
    first = next(model.parameters())
    if first.device.type != "cpu" or torch.is_autocast_enabled("cpu") or any(p.dtype.itemsize < 4 for p in model.parameters()):
        return 1e-3
    return 1e-4 if single else 1e-5


def depends_beside_rows(loss: Tensor, output: Any, samples: int) -> bool:
    """Whether the loss depends on parameters not only through those of the model's outputs that have a row for each sample: also
    through another output, which may be computed of these rows itself."""
    outputs = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
    of_rows = {leaf.grad_fn for leaf in outputs if leaf.ndim and len(leaf) == samples}
    others = {leaf.grad_fn for leaf in outputs} - of_rows - {None}
    if others and any(node in others for node in nodes_of(loss, beside=of_rows)):
        return True
    return any(True for _ in leaves_of(loss, beside=of_rows))


def _in_float64(part: Any) -> Any:
    return mapped(part, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def _cuda(model: nn.Module) -> list[torch.device]:
    return list({parameter.device for parameter in model.parameters() if parameter.is_cuda})


def rows_counted(target: Any, samples: int) -> int:
    """How many rows the target has, if that is no multiple of the number of ``samples``; otherwise their number.

    A collate function that leaves samples out makes such targets, and one that packs sequences."""
    shapes = {tuple(leaf.shape) for leaf in _stacked(target, samples) if leaf.ndim}
    lengths = {shape[0] for shape in shapes}
    if len(lengths) != 1 or any(samples in shape[1:] for shape in shapes):
        return samples
    (length,) = lengths
    return samples if length % samples == 0 else length


def _stacked(part: Any, samples: int) -> Iterator[Tensor]:
    """The tensors of a target, without those in lists that have one entry per sample."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from _stacked(value, samples)
    elif isinstance(part, tuple | list) and len(part) != samples:
        for value in part:
            yield from _stacked(value, samples)


def of_model(loss: Any, output: Any) -> bool:
    """Whether the model has computed this loss."""
    return any(leaf is loss for leaf in leaves(output))


def require_all_rows(target: Any, samples: int) -> None:
    """Raise `TaskError` if the target has other rows than the samples."""
    if (found := rows_counted(target, samples)) != samples:
        raise TaskError(
            f"the target of {samples} samples has {found} rows (does the collate function leave some out, or pack them?). The "
            "samples of a step are divided by their number, so rows of workers that have fewer would count more. Return the pair "
            "(sum, weight) from Task.loss, or let the collate function keep all samples"
        )


def _apart(loss: Any) -> Any:
    """A copy that changes its own state in place of the loss's: statistics of a module, attributes of an object or a function,
    and variables, of closures or of its module."""
    match loss:
        case nn.Module():
            return copy.deepcopy(loss)
        case partial():
            return partial(_apart(loss.func), *loss.args, **loss.keywords)
        case MethodType():
            return MethodType(loss.__func__, _shallow(loss.__self__))
        case FunctionType() if loss.__globals__ is vars(functional):
            return loss  # torch's losses count nothing, and copies of what their module holds are a millisecond for each trial
        case FunctionType():
            variables: dict[str, Any] = {}
            for name, value in loss.__globals__.items():
                ours = isinstance(value, FunctionType) and value.__globals__ is loss.__globals__
                variables[name] = _function(value, variables) if ours else _own(value)
            name = str(loss.__name__)
            return variables[name] if loss.__globals__.get(name) is loss else _function(loss, variables)
    return loss if isinstance(loss, BuiltinFunctionType | type) else _shallow(loss)


def _function(function: FunctionType, variables: dict[str, Any]) -> FunctionType:
    """The function with these global variables, and with variables of its own in place of those that it encloses."""
    closure = None if function.__closure__ is None else tuple(_own_cell(cell) for cell in function.__closure__)
    made = FunctionType(function.__code__, variables, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update({name: _own(value) for name, value in vars(function).items()})
    return made


def _shallow(thing: Any) -> Any:
    """A copy of an object, with attributes of its own; the object itself where it has none."""
    if isinstance(thing, type) or not hasattr(thing, "__dict__"):
        return thing
    made = copy.copy(thing)
    vars(made).update({name: _own(value) for name, value in vars(made).items()})
    return made


def _own(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _own_cell(cell: CellType) -> CellType:
    try:
        return CellType(_own(cell.cell_contents))
    except ValueError:  # it has no content yet
        return cell


def _module(loss: Any) -> nn.CrossEntropyLoss | nn.NLLLoss | None:
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return loss
    function, keywords = (loss.func, loss.keywords) if isinstance(loss, partial) and not loss.args else (loss, {})
    for known, module in _FUNCTIONS.items():
        if function is known and set(keywords) <= {"weight", "ignore_index", "reduction", "label_smoothing"}:
            made: nn.CrossEntropyLoss | nn.NLLLoss = module(**keywords)
            return made
    return None


class WeightSums:
    """Sums weights over the workers that compute a step together. Made on the event loop's thread, called in the compute thread."""

    def __init__(
        self,
        group: Group,
        groups: int,
        bridge: Bridge,
        first: Callable[[], Coroutine[Any, Any, None]] | None = None,
        *,
        parts: int | None = None,
    ) -> None:
        """``group``: these workers, which form ``groups`` compute groups. ``first``: called before the first sum over several
        workers. ``parts``: into how many parts they divide their samples, if some of them have the same."""
        self._group, self._bridge, self._first = group, bridge, first
        self.groups = groups
        self.shared = (group.size if parts is None else parts) > 1
        """Whether the samples of a step are divided."""

    def of_a_group(self, step: int, weight: float) -> float:
        """The average weight of a compute group's batch. ``weight``: this worker's; 0 if another one counts its samples. All
        workers call it once per step.

        Raises `TaskError` if it is 0."""
        if self._group.size > 1:
            weight = self._bridge.begin(self._sum(step, weight), "the sum of the loss's weights").wait()
        if not weight > 0:
            raise TaskError(f"{WEIGHTED}; the weights of step {step} add up to {weight:g} over all workers")
        return weight / self.groups

    async def _sum(self, step: int, weight: float) -> float:
        if self._first is not None:
            first, self._first = self._first, None
            await first()
        payload = TensorPayload.of(np.array([weight], np.float64))
        await all_reduce(self._group, payload, ("weight", step))
        return float(payload.tensor[0])


def parted(loss: Any) -> tuple[Tensor, Tensor | float] | None:
    """The pair (sum, weight), if the task's loss or metric has returned one; otherwise ``None``.

    Raises `TaskError` if the weight depends on parameters: the gradient would be another one than that of sum / weight."""
    match loss:
        case (Tensor() | Real() as total, Tensor() | Real() as weight):
            sum_ = total if isinstance(total, Tensor) else torch.tensor(float(total), dtype=torch.float64)
            if sum_.numel() != 1 or (isinstance(weight, Tensor) and weight.numel() != 1):
                return None
            if isinstance(weight, Tensor) and weight.requires_grad:
                raise TaskError(
                    "the second value of the pair that Task.loss(output, target) has returned depends on the model's parameters. A "
                    "pair is (sum, weight): the loss is sum / weight, and no gradient goes through the weight. Return the loss "
                    "alone (other figures belong in Task.metrics); if a weight is meant, detach it"
                )
            return sum_, weight if isinstance(weight, Tensor) else float(weight)
    return None


def weight_of(pair: Any) -> Any:
    """The weight of a pair (sum, weight)."""
    _, weight = pair
    return weight


def mean_of(total: Tensor, weight: Tensor | float) -> Tensor:
    """The mean loss of one micro-batch, a tensor of one element; 0 if its weight is 0."""
    return total / (weight.clamp(min=torch.finfo(torch.float32).tiny) if isinstance(weight, Tensor) else weight or 1.0)
