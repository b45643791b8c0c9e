"""What the workers of a run must have alike: model, optimizer, loss, and the numbers of samples.

Machines without a common file system have copies of the task, and one of them may be older. Its worker would train something else,
and nobody would notice. So each worker says what it has, and the first to say so is the measure; a difference ends the run. Files
that differ may do so on purpose (paths of the machine), and are only warned of.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import zmqtrain
from zmqtrain.data.content import attributes_of
from zmqtrain.errors import TaskError
from zmqtrain.membership.alike import MOST_THINGS, Difference, Facts, bounded
from zmqtrain.membership.context import RoleContext
from zmqtrain.world import current_world

#: With what the name begins of what is said of the samples of some data.
CONTENT = "the content of"
#: The name of what is said of an optimizer.
OPTIMIZER = "the optimizer"
#: Of the words in a module's description, those that differ between processes that have the same: addresses, and devices.
_OWN = re.compile(r"0x[0-9a-f]+|\b(cuda|xpu|mps):\d+")
#: Parts of the paths of files that are not the user's own.
_INSTALLED = ("site-packages", "dist-packages")
#: Modules whose files are not the user's own, by name: thousands, of which in simulated worlds each worker would look at all.
_NOT_OWN: dict[str, ModuleType] = {}
#: How the module of a task's file is named.
_TASK = "zmqtrain_task_"
_REMEDY = (
    "All workers must train the same: is the same version of the code and the data on each machine? [engine] sync = true copies "
    "the folder in which you launch"
)
_OF_CONTENT = (
    "; and does the code always make the same data? Give seeds to generators (numpy.random.default_rng() has another one in each "
    "process), and sort what comes out of a set or a folder"
)

_OF_ATTRIBUTES = (
    ". Workers divide samples by their numbers, so data[i] must be the same sample on all. If it is not, give seeds to generators "
    "(numpy.random.default_rng() has another one in each process), and sort what comes out of a set or a folder"
)


async def require_same_training(context: RoleContext, subject: str, facts: Facts) -> None:
    """Say what this worker has, and compare it with what others have said of the same ``subject``. Files of the user's are compared
    if the run has several hosts.

    Raises `TaskError` if something else than files differs."""
    await require_same(context, subject, facts)
    membership, host = context.membership, context.role.host
    if len({role.host for role in context.placement.workers}) > 1:
        # What else this process has loaded must make no difference to a simulation, not even by the size of a message.
        own = {} if current_world().one_process else files()
        for difference in await membership.alike(f"{subject}: files", host, own):
            text = f"{difference.what} on {host} is another than on {difference.host}: they may train something else"
            context.recorder.event("warning", text=text)


async def require_same(context: RoleContext, subject: str, facts: Facts) -> None:
    """Say what this worker has, and compare it with what others have said of the same ``subject``. Raises `TaskError` if anything
    differs."""
    differences = await context.membership.alike(subject, context.role.host, facts)
    if differences:
        remedy = _OF_CONTENT if differences[0].what.startswith(CONTENT) else ""
        raise TaskError(f"{_said(differences[0], context)}. {_REMEDY}{remedy}")


async def warn_of_differences(context: RoleContext, subject: str, facts: Facts) -> None:
    """As `require_same`, of what may be others on purpose: datasets keep samples that they have read, paths, and whatever they
    like."""
    differences = await context.membership.alike(subject, context.role.host, facts)
    if differences:
        named = _listed([each.what for each in differences])
        context.recorder.event("warning", text=f"{named} of {_apart(context, differences[0])}{_OF_ATTRIBUTES}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _apart(context: RoleContext, there: Difference) -> str:
    here = context.role
    where = (f" on {here.host}", f" on {there.host}") if here.host != there.host else ("", "")
    return f"{here.peer}{where[0]} differs from that of {there.first}{where[1]}"


def _said(difference: Difference, context: RoleContext) -> str:
    own, their = (f"{text!r}" if text else "nothing more" for text in (difference.ours, difference.theirs))
    return f"{difference.what} of {_apart(context, difference)}: {own}, and there {their}"


def facts_of_training(
    model: nn.Module | None,
    optimizer: Optimizer,
    loss: Any = None,
    samples: Mapping[str, int | None] | None = None,
    contents: Mapping[str, Sequence[str]] | None = None,
) -> Facts:
    """What is compared.

    Args:
        model: a whole one; ``None``: it has been divided, and `facts_of_model` has said what it was.
        optimizer: the worker's.
        loss: ``None``: it is not known.
        samples: their numbers, of the training and the evaluation data; ``None`` for a stream.
        contents: what is in these, as far as it is known (`zmqtrain.data.content`).
    """
    facts = {OPTIMIZER: [type(optimizer).__name__, *_groups(optimizer)]}
    if model is not None:
        facts |= _of_model(model)
    if loss is not None:
        facts |= facts_of_loss(loss)
    for what, number in (samples or {}).items():
        facts[f"the number of samples of the {what}"] = ["a stream" if number is None else str(number)]
    facts |= {f"{CONTENT} the {what}": list(lines) for what, lines in (contents or {}).items()}
    return {what: bounded(items) for what, items in facts.items()}


def attributes_of_data(data: Mapping[str, Any]) -> Facts:
    """What `warn_of_differences` compares of datasets, by what they are."""
    return {f"`{name}` of the {what}": bounded(items) for what, each in data.items() for name, items in attributes_of(each).items()}


def facts_of_model(model: nn.Module) -> dict[str, Sequence[str]]:
    """What is compared of a whole model."""
    return {what: bounded(items) for what, items in _of_model(model).items()}


def _of_model(model: nn.Module) -> dict[str, list[str]]:
    return {
        "the model": [_OWN.sub("", line).strip() for line in repr(model).splitlines()],
        "the list of the model's parameters": [
            _tensor(name, value, trained=value.requires_grad) for name, value in model.named_parameters()
        ],
    }


def facts_of_loss(loss: Any) -> dict[str, list[str]]:
    """What is compared of a loss: the function's name, a module's settings."""
    return {"the loss": bounded([_OWN.sub("", _name(loss))])}


def files() -> Facts:
    """The user's own modules in this process, each with a digest of its file."""
    found: dict[str, list[str]] = {}
    for name, path in sorted(_own_files()):
        if len(found) == MOST_THINGS:
            break
        what = path.name if name == "__main__" or name.startswith(_TASK) else f"{path.name} (module {name})"
        with suppress(OSError):
            found[what] = [blake2b(path.read_bytes(), digest_size=8).hexdigest()]
    return found


def _own_files() -> Iterator[tuple[str, Path]]:
    for name, module in list(sys.modules.items()):
        if _NOT_OWN.get(name) is module:
            continue
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None  # some load much if they are asked
        if file.__class__ is str:
            if (path := _own_file(file)) is not None:
                yield name, path
            else:
                _NOT_OWN[name] = module


@cache
def _own_file(file: str) -> Path | None:
    """The path of a module's file if it is the user's own."""
    if not file.endswith(".py"):
        return None
    ours, base, path = Path(zmqtrain.__file__).parent, Path(sys.base_prefix), Path(os.path.abspath(file))
    if any(part in path.parts for part in _INSTALLED) or path.is_relative_to(ours) or path.is_relative_to(base):
        return None
    return path


def _groups(optimizer: Optimizer) -> Iterator[str]:
    for number, group in enumerate(optimizer.param_groups):
        yield f"group {number} of {len(group['params'])} tensors"
        for name, value in sorted(group.items()):
            if name != "params":
                yield f"group {number}: {name} = {_plain(value)}"


def _plain(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, tuple | list):
        return str([_plain(each) for each in value])
    return str(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _tensor(name: str, value: torch.Tensor, *, trained: bool) -> str:
    shape = "of no shape yet" if is_lazy(value) else tuple(value.shape)
    return f"{name} {shape} {str(value.dtype).removeprefix('torch.')}{'' if trained else ', frozen'}"


def _name(function: Any) -> str:
    match function:
        case nn.Module():
            return repr(function)
        case partial():
            settings: Iterable[str] = (f"{name}={_plain(value)}" for name, value in sorted(function.keywords.items()))
            return f"{_name(function.func)}({', '.join([*map(_plain, function.args), *settings])})"
    named = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    return str(getattr(named, "__qualname__", type(function).__name__))
