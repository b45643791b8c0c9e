"""Dataclasses of numbers and strings read from a JSON file: unknown, missing and impossible fields are errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from zmqtrain.topology.suggest import did_you_mean


def check_fields(what: str, cls: type[Any], values: Mapping[str, Any]) -> None:
    """Check that ``cls(**values)`` is valid: no field is unknown or missing, and all numbers are finite and at least 0.

    Raises `ValueError` otherwise; its text begins with ``what``."""
    known = {each.name: each for each in fields(cls)}
    for key, value in values.items():
        if key not in known:
            meant = did_you_mean(key, known)
            hint = f"; did you mean {meant!r}?" if meant else f"; known fields: {', '.join(known)}"
            raise ValueError(f"{what} has an unknown field {key!r}{hint}")
        kind = known[key].type
        if kind == "float" and (isinstance(value, bool) or not isinstance(value, int | float)):
            wanted = "a number of seconds" if key.endswith("_s") else "a number"
            raise ValueError(f"{what}: {key} is {value!r:.60}; it must be {wanted}")
        if kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{what}: {key} is {value!r:.60}; it must be a whole number")
        if kind == "bool" and not isinstance(value, bool):
            raise ValueError(f"{what}: {key} is {value!r:.60}; it must be true or false")
        if kind == "str" and not isinstance(value, str):
            raise ValueError(f"{what}: {key} is {value!r:.60}; it must be a string")
        if kind in ("float", "int") and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{what}: {key} is {value}; it must be finite and at least 0")
    for name, each in known.items():
        if name not in values and each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{what} lacks the field {name!r}")
