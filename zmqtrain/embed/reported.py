"""What a script's loop reports, as values of an event."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from zmqtrain.errors import UsageError

#: What the run itself says of a step.
_OF_THE_RUN = frozenset({"step", "samples", "seconds", "exposed_s", "staleness", "staleness_max"})


def plain_values(kind: str, values: Mapping[str, object]) -> dict[str, float | int | str | bool]:
    """The values of ``session.report(kind, ...)``, with the number of each tensor or array of one element. Raises `UsageError` for
    what is no number, text or truth value, and for names that are the run's."""
    found: dict[str, float | int | str | bool] = {}
    for name, value in values.items():
        if name == "step" or (kind == "step" and name in _OF_THE_RUN):
            raise UsageError(f"session.report({name}=...): the run itself records {name!r}, so your value needs another name")
        if isinstance(value, Tensor | np.ndarray | np.generic) and _size(value) == 1:
            value = value.item()
        if not isinstance(value, float | int | str | bool):
            what = f"{_size(value)} elements" if isinstance(value, Tensor | np.ndarray) else f"type {type(value).__name__}"
            raise UsageError(f"session.report({name}=...) takes a number, text or truth value, not a value of {what}")
        found[name] = value
    return found


def _size(value: Tensor | np.ndarray | np.generic) -> int:
    return value.numel() if isinstance(value, Tensor) else int(value.size)
