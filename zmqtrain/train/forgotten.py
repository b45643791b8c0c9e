"""What changes in training, and is not in checkpoints: values that an optimizer keeps beside its state, and a model in attributes.

A resumed run begins with their first values, without an error. It is noticed when the first checkpoint is written.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.exchange.optimizer import is_torchs_own

#: What schedules set.
_SCHEDULED = frozenset({"lr", "initial_lr", "momentum", "betas", "weight_decay"})
#: Attributes of every optimizer, and of every module.
_OPTIMIZERS = frozenset({"defaults", "param_groups", "state"})
_MODULES = frozenset(vars(nn.Module()))


class Forgotten:
    """Watches a model and its optimizer from its making until the first checkpoint."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._of_model, self._of_optimizer = _attributes(model), _beside_state(optimizer)

    def warnings(self, *, scheduled: bool) -> list[str]:
        """What to say of values that have changed. ``scheduled``: a schedule sets rates, and does so again in a resumed run."""
        return [each for each in (self._optimizers(scheduled), self._models()) if each is not None]

    def _optimizers(self, scheduled: bool) -> str | None:
        if is_torchs_own(self._optimizer):
            return None
        now = _beside_state(self._optimizer)
        changed = dict.fromkeys(key.partition("/")[0] for key, value in now.items() if self._of_optimizer.get(key) != value)
        names = [repr(key) for key in changed if not (scheduled and key in _SCHEDULED)]
        if not names:
            return None
        return (
            f"the optimizer {type(self._optimizer).__qualname__} changes {', '.join(names)} beside its state, which checkpoints do "
            "not hold: a resumed run begins with the first values. Keep what must go on in optimizer.state[parameter]"
        )

    def _models(self) -> str | None:
        now = _attributes(self._model)
        names = [repr(key) for key, before in self._of_model.items() if key in now and _differs(before, now[key])]
        if not names:
            return None
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return (
            f"the model changes {shown}, which checkpoints and model.safetensors do not hold, since they are plain attributes: a "
            "resumed run begins with the first values. If the forward uses them, keep them as buffers (register_buffer)"
        )


def _differs(before: object, now: object) -> bool:
    """Whether a value has become another one of its kind. What was ``None`` or empty at first, and holds something now, is a cache
    or a record, not something that a forward goes on with."""
    kinds = type(before) is type(now)
    return kinds and before != now and not (isinstance(before, list) and isinstance(now, list) and len(before) != len(now))


def _attributes(model: nn.Module) -> dict[str, object]:
    """What modules keep as plain attributes: numbers, tensors, and those in lists, tuples and dictionaries. Torch's own modules
    keep nothing there that changes."""
    return {
        f"{prefix}.{key}" if prefix else key: shown
        for prefix, module in model.named_modules()
        if type(module).__module__.partition(".")[0] != "torch"
        for key, value in vars(module).items()
        if key not in _MODULES and (shown := _shown(value)) is not None
    }


def _beside_state(optimizer: Optimizer) -> dict[str, object]:
    """What an optimizer has beside the ``state`` of each parameter: in its groups, as attributes of its own, and in ``state`` under
    other keys."""
    groups, known = enumerate(optimizer.param_groups), {p for group in optimizer.param_groups for p in group["params"]}
    values = {f"{key}/{number}": value for number, group in groups for key, value in group.items() if key != "params"}
    values |= {key: value for key, value in vars(optimizer).items() if key[0] != "_" and key not in _OPTIMIZERS}
    values |= {f"state[{key!r:.40}]": value for key, value in optimizer.state.items() if key not in known}
    return {key: _shown(value) for key, value in values.items() if isinstance(value, int | float | Tensor | list | tuple | dict)}


def _shown(value: object) -> object:
    """Something that does not change with ``value``, and is another one if that changes; ``None`` for what is not looked at."""
    if isinstance(value, int | float):
        return value
    # Not of subclasses: to look at a tensor that is divided over workers, all of them would have to.
    if (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter)
        and value.numel()
        and not value.is_complex()
        and not value.is_meta
    ):
        return float(value.detach().double().norm())
    if isinstance(value, list | tuple | dict):
        return [_shown(each) for each in (value.values() if isinstance(value, dict) else value)]
    return None
