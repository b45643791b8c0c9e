"""JSON that every reader accepts: NaN and infinity (of a diverged loss) are written as strings."""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(value: Any, *, indent: int | None = None) -> str:
    """As `json.dumps`, with ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` as strings; other types by `str`."""
    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(value, indent=indent, separators=separators, default=str, allow_nan=False)
    except ValueError:  # rare: only events that need it pay for it
        return json.dumps(_finite(value), indent=indent, separators=separators, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
