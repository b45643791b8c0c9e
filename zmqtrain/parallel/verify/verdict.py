"""`verify`: whether a divided model is the ordinary one, agreed on by all processes, and said so that a person can act on it."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.data.batch import Batch
from zmqtrain.errors import DifferentModelError, UsageError
from zmqtrain.parallel.communicator import Fabric, Label
from zmqtrain.parallel.copying import ITSELF, refers_to_itself
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.model import ParallelModel, Statistics, map_tensors, parallelize
from zmqtrain.parallel.plan import Plan
from zmqtrain.parallel.verify.case import Case, Difference, Found, NotInDouble, NotSmaller, alone
from zmqtrain.parallel.verify.compare import compare
from zmqtrain.parallel.verify.watch import Watch

#: A difference as text, which all processes send alike.
_MOST_BYTES = 4096
#: The precision that is tried first.
FIRST = torch.float64
_PHASES = ("training", "evaluation")
_WHATS = ("output", "loss", "gradient", "buffer", "parameter", "update")
#: Differences that are of a parameter or buffer, and so of its module.
_OF_TENSORS = ("gradient", "buffer", "parameter")


@dataclass(frozen=True, slots=True)
class Verified:
    """A comparison in which nothing differed: the number of samples, and the precision."""

    samples: int
    precision: str
    """``float64``, or ``float32`` for a model that fails in double precision."""
    images: str = ""
    """The height and width of what was taken of each image, like ``96x96``; empty: all of it."""


def verify(
    model: nn.Module | Callable[[], nn.Module],
    grid: Grid | str,
    plan: Plan | None = None,
    *,
    fabric: Fabric,
    inputs: tuple[Any, ...],
    named: Mapping[str, Any] | None = None,
    target: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    seed: int = 0,
    statistics: Statistics = "whole",
    whole: Iterable[str] = (),
) -> Verified:
    """Compare a divided model with the ordinary one, on a small batch. All processes of the grid call it, with equal arguments.

    In training: the outputs, the loss, every gradient, every buffer, and the parameters, which a forward may change; in evaluation
    afterwards, with other weights: the outputs, buffers and parameters; and two steps of the optimizer with the smallest and the
    largest parameter of each parameter group and way to be divided. Of large gradients, parameters and updates a random combination
    of each row's elements is compared. In double precision where the model can. Nothing that is given changes. Dropout within
    torch's own attention and recurrent layers is left out of it. Rank 0 runs the ordinary model, and needs the memory of one in
    double precision, without its gradients.

    Args:
        model: the ordinary one, which can be copied; or what makes an equal one at each call.
        grid, plan, seed, statistics, whole: as `parallelize` takes them. With local statistics, gradients are those in evaluation.
        fabric: this process's connections to the others.
        inputs: by position, the whole batch's: samples along the first dimension. A few, at least one a process.
        named: inputs by name.
        target: what ``loss(output, target)`` compares with.
        loss: the mean over its samples; by default a weighted sum of the outputs.
        optimizer: makes the optimizer of a list of parameters; by default none is compared.

    Raises `DifferentModelError` on all processes where there is a difference. Raises `UsageError` as `parallelize` does,
    and for a model that cannot be copied.
    """
    grid = Grid.parse(grid) if isinstance(grid, str) else grid
    if isinstance(model, nn.Module) and refers_to_itself(model):
        raise UsageError(f"{type(model).__name__} cannot be copied: {ITSELF}; or give verify a function that makes the model")
    make: Callable[[], nn.Module] = (lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else model
    settings: dict[str, Any] = {"seed": seed, "statistics": statistics, "whole": tuple(whole)}

    def divide() -> ParallelModel:
        with alone():
            ordinary = make()
        return parallelize(ordinary, grid, plan, fabric=fabric, **settings)

    def optimizer_of(any_model: nn.Module) -> Optimizer:
        assert optimizer is not None
        return optimizer([each for each in any_model.parameters() if each.requires_grad and each.numel()])

    samples = _samples((inputs, dict(named or {})))
    return verified(
        Case(
            make=make,
            divide=divide,
            batch=Batch(inputs, target, samples, named=dict(named or {})),
            loss=loss or ramp,
            optimizer=None if optimizer is None else optimizer_of,
            share=lambda divided, size: PlainShare(divided, size),
            seed=seed,
            local_statistics=statistics == "local",
            dtype=FIRST,
        ),
        fabric,
    )


def verified(case: Case, fabric: Fabric) -> Verified:
    """The same for any `Case`. Raises `DifferentModelError` on all processes alike."""
    while True:
        try:
            found = compare(case, fabric)
        except NotSmaller:
            case = replace(case, smaller=False)
        except NotInDouble:
            case = replace(case, dtype=torch.float32)
        else:
            break
    worst = _agreed(fabric, found.differences)
    if worst is not None:
        watch = Watch()
        every = tuple(range(fabric.size))  # each sees the ordinary model's activations beside its own
        again = compare(replace(case, references=every), fabric, watch)
        raise _error(case, fabric, worst, again if again.differences else found, watch)
    images = ", ".join(f"{height}x{width}" for height, width in found.sizes.values())
    return Verified(case.batch.samples, str(case.dtype).removeprefix("torch."), images)


class PlainShare:
    """Implements `Shared` for a loss that is a mean over samples."""

    def __init__(self, model: ParallelModel, samples: int) -> None:
        self._model, self._samples = model, samples

    def begin(self, step: int, micro_batch: int, micro_batches: int) -> None:
        self._model.batch.size, self._model.batch.step = self._samples, step

    def of_output(self, batch: Batch) -> Batch:
        return batch.part(self._model.output_range())

    def loss(self, measure: Callable[[Any, Any], Any], output: Any, target: Any) -> Any:
        return measure(output, target)


def ramp(output: Any, target: Any) -> Tensor:
    """A loss to which every element of every output counts, and each in another way."""
    total = torch.zeros((), dtype=torch.float64)

    def add(each: Tensor) -> None:
        nonlocal total
        if each.is_floating_point():
            values = each.flatten(1) if each.dim() > 1 else each.reshape(-1, 1)
            ways = torch.cos(torch.arange(values.shape[1], dtype=values.dtype, device=values.device) + 1)
            total = total.to(values.device) + (values * ways).sum(1).mean()

    map_tensors(output, add)
    return total


def _samples(inputs: Any) -> int:
    found: list[int] = []
    map_tensors(inputs, lambda each: found.append(each.shape[0]) if each.dim() else None)
    if not found:
        raise UsageError("verify needs inputs with samples along their first dimension")
    return found[0]


def _agreed(fabric: Fabric, differences: list[Difference]) -> Difference | None:
    """The difference that says most, of all processes; ``None``: there is none."""
    own = min(differences, key=_rank, default=None)
    texts = _gathered(fabric, None if own is None else [own.phase, own.what, own.name, own.by, own.of, own.order])
    return min((Difference(*each) for each in texts if each is not None), key=_rank, default=None)


def _rank(difference: Difference) -> tuple[int, int, int, str]:
    return _PHASES.index(difference.phase), _WHATS.index(difference.what), difference.order, difference.name


def _gathered(fabric: Fabric, value: Any) -> list[Any]:
    """A small value of each process, in order of ranks."""
    text = json.dumps(value).encode()
    if len(text) > _MOST_BYTES:
        text = b"null"
    own = torch.zeros(_MOST_BYTES, dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    everyone = tuple(range(fabric.size))
    parts = fabric.among(everyone).all_gather(own, [tuple(own.shape)] * fabric.size, Label("", "statistics")).wait()
    return [json.loads(bytes(part.tolist()).rstrip(b"\0").decode()) for part in parts]


def _error(case: Case, fabric: Fabric, worst: Difference, found: Found, watch: Watch) -> DifferentModelError:
    """What to say, from what all processes have seen."""
    first = min((each for each in _gathered(fabric, watch.first) if each is not None), default=None)
    phase, module = watch.modules[first] if first is not None else (worst.phase, None)
    gradients = [each for each in found.differences if each.what in ("gradient", "update")]
    if module is not None:
        inside = [each for each in gradients if not module or each.name.rpartition(".")[0] == module]
        parameter = _agreed(fabric, inside) or _agreed(fabric, gradients)
    else:
        parameter = _agreed(fabric, gradients)
    if worst.what == "update":
        kind = _optimizer_name(case)
        return DifferentModelError(
            f"the optimizer {kind} updates parts of a parameter other than the whole ({worst.name}: {_by(worst)}), and this "
            "model's parameters are divided: use one that treats each element by itself, such as SGD, Adam or AdamW, with groups "
            "and rates that do not follow from the sizes of parameters (a worker has parts of them), or leave layers whole "
            '([parallel] whole = ["NAME"])',
            module=worst.name.rpartition(".")[0], parameter=worst.name,
        )  # fmt: skip
    if worst.what == "loss":
        return DifferentModelError(
            f"the loss of a batch is not the mean of the losses of its parts ({_by(worst)}), though the model's outputs are alike: "
            "each column of a grid computes the loss of its own samples, so a grid of several columns is no use for it; use one "
            "column, or set [parallel] verify = false if that is what you mean",
            module="", parameter="",
        )  # fmt: skip
    if module is None and worst.what in _OF_TENSORS:
        module = worst.name.rpartition(".")[0]
        what = (
            f"what the forward makes of parameter {worst.name}"
            if worst.what == "parameter"
            else f"the {worst.what} of {worst.name}"
        )
        what += f" differs by {_by(worst)}"
    elif module is None:
        what = f"output {worst.name} differs by {_by(worst)}"
    else:
        what = f"the output of {_named(module)} is the first that differs"
        if parameter is not None:
            what += f", and the {'gradient' if parameter.what == 'gradient' else 'update'} of {parameter.name} by {_by(parameter)}"
    named = parameter.name if parameter is not None else worst.name if worst.what in _OF_TENSORS else ""
    advice = f'leave it whole ([parallel] whole = ["{module}"])' if module else "leave layers whole ([parallel] whole)"
    return DifferentModelError(
        f"divided over the grid, this model is another one than in one process: in {phase}, {what}. Please report it. Until it is "
        f"mended, {advice}, divide it in another way ([compute] grid, [parallel] layers), or train it so all the same "
        "([parallel] verify = false)",
        module=module or "", parameter=named,
    )  # fmt: skip


def _by(difference: Difference) -> str:
    if math.isinf(difference.by):
        return "one has none, or another shape"
    return f"{difference.by:.1e} where the largest is {difference.of:.1e}"


def _named(module: str) -> str:
    return f"module {module}" if module else "the whole model"


def _optimizer_name(case: Case) -> str:
    assert case.optimizer is not None
    with alone():
        return type(case.optimizer(case.make())).__name__
