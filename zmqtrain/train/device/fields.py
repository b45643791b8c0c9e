"""Dataclasses of numbers and texts that come from a JSON file: nothing unknown, missing or impossible in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from zmqtrain.topology.suggest import did_you_mean


def check_fields(what: str, cls: type[Any], values: Mapping[str, Any]) -> None:
    """Raise `ValueError`, which begins with ``what``, unless ``cls(**values)`` is such as a device and a model can have: no field
    unknown or missing, and all numbers finite and 0 or more."""
    known = {each.name: each for each in fields(cls)}
    for key, value in values.items():
        if key not in known:
            meant = did_you_mean(key, known)
            hint = f"; did you mean {meant!r}?" if meant else f"; there are {', '.join(known)}"
            raise ValueError(f"{what} has an unknown field {key!r}{hint}")
        kind = known[key].type
        if kind == "float" and (isinstance(value, bool) or not isinstance(value, int | float)):
            wanted = "seconds belong" if key.endswith("_s") else "a number belongs"
            raise ValueError(f"{what}: {key} is {value!r:.60}, where {wanted}")
        if kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{what}: {key} is {value!r:.60}, where a whole number belongs")
        if kind == "bool" and not isinstance(value, bool):
            raise ValueError(f"{what}: {key} is {value!r:.60}, where true or false belongs")
        if kind == "str" and not isinstance(value, str):
            raise ValueError(f"{what}: {key} is {value!r:.60}, where a text belongs")
        if kind in ("float", "int") and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{what}: {key} is {value}; it must be 0 or more, and finite")
    for name, each in known.items():
        if name not in values and each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{what} has no {name}")
