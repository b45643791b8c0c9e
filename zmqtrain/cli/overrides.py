"""``--set job.steps=10``: values on the command line that go before the topology file's."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.topology.load import load_topology, parse_topology
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.toml_writer import write_toml


def load_with(path: Path, settings: Sequence[str]) -> Topology:
    """The topology in a file with ``settings`` (``section.key=value``) put over it. Raises `TopologyError` and `UsageError`.

    A value is TOML where it can be read as such, else a text. Lines in faults are then of the resulting topology, not of the file.
    """
    if not settings:
        return load_topology(path)
    load_topology(path)  # faults of the file itself come with its own lines
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    document.setdefault("job", {})
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or "." not in key:
            raise UsageError(f"--set {setting}: write section.key=value, like --set job.steps=100")
        _put(document, key.split("."), _value(text), setting)
    return parse_topology(write_toml(document), file=f"{path} with --set", name=path.stem)


def _put(document: dict[str, Any], path: Sequence[str], value: Any, setting: str) -> None:
    table: Any = document
    for part in path[:-1]:
        table = table[int(part)] if isinstance(table, list) and part.isdigit() and int(part) < len(table) else table
        if isinstance(table, dict):
            table = table.setdefault(part, {})
    if not isinstance(table, dict):
        raise UsageError(f"--set {setting}: {'.'.join(path[:-1])} is no table of the topology file")
    table[path[-1]] = value
    if path[0] == "job" and path[-1] in ("steps", "epochs", "until"):  # the new length of training replaces the old
        for other in {"steps", "epochs", "until"} - {path[-1]}:
            table.pop(other, None)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
