"""Read a topology file. Everything that is wrong with it is reported in one `TopologyError`."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from zmqtrain.topology.broken_rule import BrokenRule, Path
from zmqtrain.topology.faults import FileFault, TopologyFaultsError, clean_path, faults_of
from zmqtrain.topology.rounded import rounded_size
from zmqtrain.topology.schema import RULES_ERROR, Topology
from zmqtrain.topology.toml_lines import find_lines

#: A topology file is written by hand; anything larger is another kind of file, and is not read.
LARGEST_FILE = 4 * 2**20

_LINE = re.compile(r"\(at line (\d+), column (\d+)\)")


def load_topology(path: str | FilePath) -> Topology:
    """The topology in a file, with all defaults filled in; ``[job] name`` defaults to the file's name.

    Raises `TopologyError` with all faults: path, line and value of each, and what the user may have meant (``faults`` as data).
    """
    file = FilePath(path)
    return parse_topology(_read(file), file=str(path), name=file.stem)


def parse_topology(text: str, *, file: str = "topology", name: str = "job") -> Topology:
    """The topology in a text; ``file`` is the name used in faults, ``name`` the job's default name. Raises like `load_topology`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _LINE.search(str(error))
        line = int(match[1]) if match else max(1, text.count("\n") + (not text.endswith("\n")))
        message = _LINE.sub("", str(error)).replace("(at end of document)", "at the end of the file").strip()
        if message == "Invalid value":  # of a text without quotes, mostly
            message += ' (texts stand in quotes, like "task.py:task"; the other values are numbers, true, false and lists)'
        if file.endswith(".py"):
            message += ". The first file must be a topology file; a script comes after it"
        raise TopologyFaultsError([FileFault(file, "", line, f"is not valid TOML: {message}")]) from error
    except ValueError as error:  # an integer of thousands of digits
        raise TopologyFaultsError([FileFault(file, "", None, f"is not valid TOML: {error}")]) from error
    except RecursionError as error:
        raise TopologyFaultsError([FileFault(file, "", None, "cannot be read: its tables are nested too deeply")]) from error
    job = document.get("job")
    if isinstance(job, dict):
        job.setdefault("name", job_name(name))
    try:
        return Topology.model_validate(document)
    except ValidationError as error:
        raise TopologyFaultsError(_all_faults(error, document, file, text)) from error


def job_name(stem: str) -> str:
    """The job name for a file of this name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip(".-")[:64]
    return name or "job"


def _what_to_give(file: FilePath) -> str:
    if ".py:" in file.name:
        return f'give the path of a topology file, with task = "{file}" in its [job]'
    return "give the path of a topology file"


def _read(file: FilePath) -> str:
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise TopologyFaultsError(
                [FileFault(str(file), "", None, f"is larger than {rounded_size(LARGEST_FILE)}, so it cannot be a topology file")]
            )
        return file.read_bytes().decode("utf-8-sig")  # some editors begin a file with a mark of its encoding
    except FileNotFoundError as error:
        raise TopologyFaultsError([FileFault(str(file), "", None, f"does not exist: {_what_to_give(file)}")]) from error
    except UnicodeDecodeError as error:
        line = file.read_bytes()[: error.start].count(b"\n") + 1
        raise TopologyFaultsError([FileFault(str(file), "", line, "is not UTF-8 text, so it cannot be a topology file")]) from error
    except IsADirectoryError as error:
        raise TopologyFaultsError([FileFault(str(file), "", None, "is a folder: give the path of a topology file")]) from error
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise TopologyFaultsError([FileFault(str(file), "", None, f"cannot be read: {error}")]) from error


def _all_faults(error: ValidationError, document: dict[str, Any], file: str, text: str) -> list[FileFault]:
    """The faults of single fields, and the broken rules among valid fields: pydantic checks rules only if all fields are valid."""
    lines = find_lines(text)
    faults = [fault for fault, _ in faults_of(error, document, file, lines)]
    bad = [clean_path(detail["loc"], document) for detail in error.errors(include_url=False) if detail["type"] != RULES_ERROR]
    if bad:
        faults += [fault for fault, rule in _faults_of_rest(document, bad, file, lines) if not _touches(rule, bad)]
    return sorted(faults, key=lambda fault: (fault.line is None, fault.line or 0, fault.path))


def _faults_of_rest(
    document: dict[str, Any], bad: list[Path], file: str, lines: dict[Path, int]
) -> list[tuple[FileFault, BrokenRule | None]]:
    """The broken rules of the document without its invalid fields."""
    rest = copy.deepcopy(document)
    rest.setdefault("job", {})
    for path in sorted(set(bad), key=lambda path: tuple(map(str, path)), reverse=True):
        _remove(rest, path)
    try:
        Topology.model_validate(rest)
    except ValidationError as error:
        return [(fault, rule) for fault, rule in faults_of(error, rest, file, lines) if rule is not None]
    return []


def _remove(document: Any, path: Path) -> None:
    for part in path[:-1]:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(document, dict):
        document.pop(str(path[-1]), None)


def _touches(rule: BrokenRule | None, bad: list[Path]) -> bool:
    """Whether a rule involves a field that is itself invalid (or lies in an invalid table), and so did not have the file's
    value.
    """
    return rule is not None and any(one[: len(path)] == path or path[: len(one)] == one for one in rule.involves for path in bad)
