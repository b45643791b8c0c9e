"""What two topologies train differently. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zmqtrain.topology.schema import Topology
from zmqtrain.topology.toml_writer import write_value

#: The settings that say what is trained and how; an empty tuple stands for all of a section. The others say where, how fast, how
#: long, and what is kept of it.
_TRAINED: Mapping[str, tuple[str, ...]] = {
    "job": ("task", "args", "seed", "on_nan"),
    "compute": ("groups", "group_size", "grid", "batch_size", "accumulate", "precision", "noise"),
    "exchange": (),
    "optimizer": (),
    "data": ("shuffle", "ring"),
}
_UNSET = "not set"


def changed_settings(old: Topology, new: Topology) -> list[str]:
    """Those settings of ``new`` that bear on what is trained and are not as in ``old``: ``[exchange] every = 4 (was 2)``."""
    before, after = dict(_trained(old.to_dict())), dict(_trained(new.to_dict()))
    names = [*after, *(name for name in before if name not in after)]
    return [
        f"{name} = {after.get(name, _UNSET)} (was {before.get(name, _UNSET)})"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _trained(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for section, names in _TRAINED.items():
        for name, value in values.get(section, {}).items():
            if not names or name in names:
                yield from _flat(f"[{section}] {name}", value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(f"{name}.{key}", each)
    elif value is not None:
        yield name, write_value(value)
