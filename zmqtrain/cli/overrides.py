"""``--set job.steps=10``: values on the command line that override the topology file's."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.topology.faults import dotted
from zmqtrain.topology.load import load_topology
from zmqtrain.topology.overrides import Override, overridden
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.toml_lines import find_lines


def load_with(path: Path, settings: Sequence[str]) -> Topology:
    """Load the topology in a file with ``settings`` (``section.key=value``) applied to it. Raises `TopologyError` and `UsageError`.

    A value is read as TOML if possible, otherwise as a string. An error quotes the setting that caused it; all other errors give
    the line of the file.
    """
    if not settings:
        return load_topology(path)
    load_topology(path)  # errors of the file itself give their lines
    text = path.read_text(encoding="utf-8")
    lines = {dotted(place): line for place, line in find_lines(text).items()}
    overrides = [_override(setting) for setting in settings]
    return overridden(tomllib.loads(text), overrides, file=str(path), name=path.stem, lines=lines)


def _override(setting: str) -> Override:
    key, equals, value = setting.partition("=")
    if not equals or "." not in key:
        raise UsageError(f"--set {setting}: write section.key=value, like --set job.steps=100")
    return Override(tuple(key.split(".")), _value(value), f"--set {setting}")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
