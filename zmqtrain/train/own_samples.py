"""What a model keeps of a worker's own samples, besides gradients, and modes in which it is not trained.

Gradients are summed over the workers. What a forward itself writes is not: parameters that it changes would differ between workers,
so that is refused. Buffers that differ (a running mean of the model's own) are warned of; those of batch norm are known to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.errors import TaskError
from zmqtrain.wire.tensor import TensorPayload

#: A warning lists this many names before it counts the rest.
MOST_LISTED = 3


def versions_of(model: nn.Module) -> dict[str, int]:
    """How often each parameter has been changed."""
    return {name: parameter._version for name, parameter in model.named_parameters()}


def _changed(model: nn.Module, before: Mapping[str, int]) -> list[str]:
    return [name for name, version in versions_of(model).items() if before.get(name, version) != version]


def require_unchanged(model: nn.Module, before: Mapping[str, int]) -> None:
    """Raise `TaskError` if a parameter has been changed since `versions_of` returned ``before``."""
    if changed := _changed(model, before):
        raise TaskError(
            f"the model's forward changes {_listed(changed)}, each worker's by its own samples, so workers would have different "
            "parameters. Set such values in Task.model(), which all workers call with the same seed, or let the optimizer change "
            "them. What the forward computes of other weights (a teacher, an average) may be in buffers (register_buffer), which "
            "are compared"
        )


def require_kept(model: nn.Module, before: Mapping[str, int]) -> None:
    """Raise `TaskError` if callbacks have changed a parameter since `versions_of` returned ``before``."""
    if changed := _changed(model, before):
        raise TaskError(
            f"a callback has changed {_listed(changed)}, but when it is called, updates may be on their way that would be lost, or "
            "undo the change. Let the optimizer change parameters, in its step() or by a hook on it "
            "(register_step_post_hook), or use a loop of your own (docs/sessions.md)"
        )


def loss_warning(loss: object) -> str | None:
    """A warning about a loss with parameters of its own, which nobody trains; ``None`` if it has none."""
    if not isinstance(loss, nn.Module) or not (own := [name for name, p in loss.named_parameters() if p.requires_grad]):
        return None
    return (
        f"Task.loss has parameters ({_listed(own)}), which nobody trains, as Task.optimizer gets those of the model. To train "
        "them, make the loss a part of the model, which then returns it; otherwise freeze them: requires_grad_(False)"
    )


def modes_warning(model: nn.Module) -> str | None:
    """A warning about modules of a model in training mode that are in evaluation mode themselves; ``None`` if there are none."""
    names = [name for name, module in model.named_modules() if not module.training]
    if not model.training or not names:
        return None
    outermost = [name for name in names if not any(name.startswith(f"{each}.") for each in names)]
    return (
        f"Task.model() returned {_listed(outermost)} in evaluation mode (eval()). Each step is computed in training mode, as after "
        "model.train(), so dropout drops there, too, and batch norm uses its batch. To keep a module in evaluation mode, define "
        "its train(mode) such that it stays there"
    )


def own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that should be the same on workers with the same parameters."""
    norms = {name for name, module in model.named_modules() if isinstance(module, _NormBase)}
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if not buffer.is_complex() and buffer.numel() and name.rpartition(".")[0] not in norms
    }


async def differing_buffers(buffers: Mapping[str, Tensor], group: Group, tag: str) -> list[str]:
    """The names of buffers that the members of ``group`` have differently. All of them call it, with buffers of the same names."""
    rows = np.zeros((group.size, 2, len(buffers)))
    with torch.no_grad():
        for place, buffer in enumerate(buffers.values()):
            exact = buffer.detach().double()
            rows[group.rank, :, place] = float(exact.sum()), float(exact.abs().sum())
    await all_reduce(group, TensorPayload.of(rows.reshape(-1)), (tag, "buffers"))
    sums = np.nan_to_num(rows, posinf=0.0, neginf=0.0)
    apart = np.ptp(sums, axis=0).max(axis=0) > 1e-4 * np.abs(sums).max(axis=(0, 1))
    return [name for name, differs in zip(buffers, apart.tolist(), strict=True) if differs]


def buffers_warning(names: Sequence[str]) -> str:
    """A warning about buffers that workers have differently."""
    return (
        f"workers have different values of {_listed(names, 'the buffer')}: the forward computes them of each worker's own "
        "samples, as batch norm does, and not of the whole batch. The run's model has those of the first worker"
    )


def _listed(names: Sequence[str], what: str = "") -> str:
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"{what} {', '.join(map(repr, names[:MOST_LISTED]))}{more}".strip()
