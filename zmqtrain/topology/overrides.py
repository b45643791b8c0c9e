"""Values that replace those of a topology: ``--set job.steps=10`` on the command line, ``launch(..., steps=10)`` in a program."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.topology.faults import NOT_TEXT, FileFault, TopologyFaultsError, dotted
from zmqtrain.topology.load import load_topology, parse_topology
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.toml_lines import find_lines
from zmqtrain.topology.toml_writer import write_toml


@dataclass(frozen=True, slots=True)
class Override:
    """One value that replaces another."""

    path: tuple[str, ...]
    """Its section, its key, and what is within; a number is an index into an array."""
    value: Any
    label: str
    """How it was given, which errors quote."""
    text: str | None = None
    """How it was written, if it was text that may also be read as a number, a date and so on: what a field of text gets."""

    @property
    def dotted(self) -> str:
        """Its path as faults have it."""
        return dotted(tuple(int(part) if part.isdigit() else part for part in self.path))


def overridden(
    document: dict[str, Any], overrides: Sequence[Override], *, file: str, name: str, lines: Mapping[str, int]
) -> Topology:
    """The topology of a document in which the values are replaced; ``document`` is changed.

    Args:
        document: the values of a topology that has no faults by itself.
        overrides: a later one replaces an earlier one.
        file: what errors name if no single override has caused them.
        name: the job's name, if the document has none.
        lines: the document's lines by dotted path; empty if it is in no file.

    Raises `TopologyError` and `UsageError`.
    """
    document.setdefault("job", {})
    for override in overrides:
        _put(document, override)
    try:
        return parse_topology(write_toml(document), file=file, name=name)
    except TopologyFaultsError as error:
        no_text = {fault.path for fault in error.faults if fault.message == NOT_TEXT}
        meant = [replace(each, value=each.text, text=None) if each.text and each.dotted in no_text else each for each in overrides]
        if meant != list(overrides):
            return overridden(document, meant, file=file, name=name, lines=lines)
        raise TopologyFaultsError([_placed(fault, overrides, lines) for fault in error.faults]) from error


def load_overridden(path: Path, overrides: Sequence[Override]) -> Topology:
    """The topology in a file in which the values are replaced. Raises `TopologyError`, with the file's lines, and `UsageError`."""
    topology = load_topology(path)  # errors of the file itself give their lines
    if not overrides:
        return topology
    text = path.read_text(encoding="utf-8-sig")
    lines = {dotted(place): line for place, line in find_lines(text).items()}
    return overridden(tomllib.loads(text), overrides, file=str(path), name=path.stem, lines=lines)


def _placed(fault: FileFault, overrides: Sequence[Override], lines: Mapping[str, int]) -> FileFault:
    """Attribute an error of the resulting topology, which is not in any file: to the last value that caused it, or else to the
    file."""
    for override in reversed(overrides):
        if _within(fault.path, override.dotted) or _within(override.dotted, fault.path):
            return replace(fault, file=override.label, line=None)
    given = ", ".join(override.label for override in overrides)
    message = f"{fault.message} (with {given})" if given else fault.message
    return replace(fault, line=lines.get(fault.path), message=message)


def _within(path: str, other: str) -> bool:
    """Whether a dotted path equals ``other`` or lies within it."""
    return path == other or path.startswith((f"{other}.", f"{other}["))


def _put(document: dict[str, Any], override: Override) -> None:
    path = override.path
    inner: Any = document
    for part in path[:-1]:
        if isinstance(inner, list) and part.isdigit() and int(part) < len(inner):
            inner = inner[int(part)]
        elif isinstance(inner, dict):
            inner = inner.setdefault(part, {})
    if not isinstance(inner, dict):
        raise UsageError(f"{override.label}: {'.'.join(path[:-1])} is not a table of the topology file")
    inner[path[-1]] = override.value
    if path[0] == "job" and path[-1] in ("steps", "epochs", "until"):  # the new length of training replaces the old
        for other in {"steps", "epochs", "until"} - {path[-1]}:
            inner.pop(other, None)
