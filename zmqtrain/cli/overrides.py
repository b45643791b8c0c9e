"""``--set job.steps=10``: values on the command line that override the topology file's."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.topology.faults import FileFault, TopologyFaultsError, dotted
from zmqtrain.topology.load import load_topology, parse_topology
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.toml_lines import find_lines
from zmqtrain.topology.toml_writer import write_toml


def load_with(path: Path, settings: Sequence[str]) -> Topology:
    """Load the topology in a file with ``settings`` (``section.key=value``) applied to it. Raises `TopologyError` and `UsageError`.

    A value is read as TOML if possible, otherwise as a string. An error quotes the setting that caused it; all other errors give
    the line of the file.
    """
    if not settings:
        return load_topology(path)
    load_topology(path)  # errors of the file itself give their lines
    text = path.read_text(encoding="utf-8")
    document = tomllib.loads(text)
    document.setdefault("job", {})
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or "." not in key:
            raise UsageError(f"--set {setting}: write section.key=value, like --set job.steps=100")
        _put(document, key.split("."), _value(value), setting)
    try:
        return parse_topology(write_toml(document), file=str(path), name=path.stem)
    except TopologyFaultsError as error:
        lines = {dotted(place): line for place, line in find_lines(text).items()}
        raise TopologyFaultsError([_placed(fault, settings, lines) for fault in error.faults]) from error


def _placed(fault: FileFault, settings: Sequence[str], lines: Mapping[str, int]) -> FileFault:
    """Attribute an error of the resulting topology, which is not in any file: to the last setting that caused it, or else to the
    file."""
    for setting in reversed(settings):
        key = dotted(tuple(int(part) if part.isdigit() else part for part in setting.partition("=")[0].split(".")))
        if _within(fault.path, key) or _within(key, fault.path):
            return replace(fault, file=f"--set {setting}", line=None)
    given = ", ".join(f"--set {setting}" for setting in settings)
    return replace(fault, line=lines.get(fault.path), message=f"{fault.message} (with {given})")


def _within(path: str, other: str) -> bool:
    """Whether a dotted path equals ``other`` or lies within it."""
    return path == other or path.startswith((f"{other}.", f"{other}["))


def _put(document: dict[str, Any], path: Sequence[str], value: Any, setting: str) -> None:
    table: Any = document
    for part in path[:-1]:
        if isinstance(table, list) and part.isdigit() and int(part) < len(table):
            table = table[int(part)]
        elif isinstance(table, dict):
            table = table.setdefault(part, {})
    if not isinstance(table, dict):
        raise UsageError(f"--set {setting}: {'.'.join(path[:-1])} is not a table of the topology file")
    table[path[-1]] = value
    if path[0] == "job" and path[-1] in ("steps", "epochs", "until"):  # the new length of training replaces the old
        for other in {"steps", "epochs", "until"} - {path[-1]}:
            table.pop(other, None)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
