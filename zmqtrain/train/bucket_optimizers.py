"""The task's optimizer, run on one bucket's parameters at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.exchange.optimizer import require_separable


class BucketOptimizers:
    """Optimizers of the same class, one per bucket, that share the state and the hyperparameters of the one they are made from.

    Checkpoints and learning-rate schedules therefore see the task's own optimizer, as if it ran itself. Anything else that an
    optimizer keeps, beside torch's ``state`` and ``param_groups``, is shared, too. For classes of ``torch.optim`` without hooks on
    their step (`is_torchs_own`): of others it is not known that their step may be divided.
    """

    def __init__(self, optimizer: Optimizer, buckets: Sequence[Sequence[nn.Parameter]]) -> None:
        """``buckets``: the parameters of each bucket; each belongs to one of the optimizer's groups. Raises `TaskError` if the
        optimizer cannot be divided."""
        require_separable(optimizer)
        self._optimizer = optimizer
        self._parts = [_part(optimizer, parameters) for parameters in buckets]

    def prepare(self, index: int, rate: float = 1.0) -> None:
        """The bucket's next step uses the hyperparameters as they are now, with ``rate`` times the learning rate."""
        for number, group in self._parts[index][1]:
            now = self._optimizer.param_groups[number]
            # A schedule changes a tensor in place, perhaps before the step is made.
            group.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in now.items() if k != "params"})
            if rate != 1.0:
                group["lr"] = now["lr"] * rate

    def step(self, index: int) -> None:
        """Update the bucket's parameters by their gradients."""
        self._parts[index][0].step()


def _part(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> tuple[Optimizer, list[tuple[int, dict[str, object]]]]:
    """An optimizer of these parameters, and its groups, each with its number in the whole optimizer."""
    chosen = {id(parameter) for parameter in parameters}
    groups: list[tuple[int, dict[str, object]]] = []
    for number, group in enumerate(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if own:
            groups.append((number, {**group, "params": own}))
    part: Optimizer = object.__new__(type(optimizer))
    # Everything is shared except the groups and `step`, which schedules and sessions replace on the object.
    part.__dict__.update({key: value for key, value in vars(optimizer).items() if key not in ("step", "zero_grad")})
    part.param_groups = [group for _, group in groups]
    return part, groups
