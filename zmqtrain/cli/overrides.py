"""``--set job.steps=10``: values on the command line that override the topology file's."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.topology.overrides import Override, load_overridden
from zmqtrain.topology.schema import Topology


def load_with(path: Path, settings: Sequence[str]) -> Topology:
    """Load the topology in a file with ``settings`` (``section.key=value``) applied to it. Raises `TopologyError` and `UsageError`.

    A value is read as TOML if possible and if the key does not take text, otherwise as a string. An error quotes the setting that
    caused it; all other errors give the line of the file.
    """
    return load_overridden(path, [_override(setting) for setting in settings])


def _override(setting: str) -> Override:
    key, equals, value = setting.partition("=")
    if not equals or "." not in key:
        raise UsageError(f"--set {setting}: write section.key=value, like --set job.steps=100")
    return Override(tuple(key.split(".")), _value(value), f"--set {setting}", value)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
