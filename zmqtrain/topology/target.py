"""The job that the arguments of `zmqtrain.launch`, `zmqtrain.simulate` and `zmqtrain.plan` describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.topology.compute import Compute
from zmqtrain.topology.job import Job
from zmqtrain.topology.load import job_name
from zmqtrain.topology.overrides import Override, load_overridden, overridden
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.suggest import did_you_mean
from zmqtrain.topology.task_function import place_of
from zmqtrain.words import typed

#: What can be launched, simulated or planned.
Target = str | PathLike[str] | Topology | Mapping[str, Any] | Callable[..., Any]

#: Sections whose keys are keywords of these functions, too: no key is in both.
_OPEN: Mapping[str, frozenset[str]] = {"job": frozenset(Job.model_fields), "compute": frozenset(Compute.model_fields)}
_SECTIONS = frozenset(Topology.model_fields) - {"data"}


@dataclass(frozen=True, slots=True)
class ProgramJob:
    """The job of a program."""

    topology: Topology
    file: Path
    """The topology file, or the name that it would have: relative paths begin at its folder."""
    function: Callable[..., Any] | None = None
    """The task's function, if the program has given it."""


def job_of(target: Target, settings: Mapping[str, Any], changes: Mapping[str, Any], *, caller: str = "launch") -> ProgramJob:
    """The job.

    Args:
        target: a topology file, a topology, a mapping like a file, a task (``"module:function"``, ``"file.py"``), or its function.
        settings: by keyword: keys of ``[job]`` and ``[compute]``, and whole sections.
        changes: by ``section.key``.
        caller: the function that errors name.

    Raises:
        UsageError: no such file, task or setting, a task that workers cannot import, or one of the errors of topologies.
    """
    overrides = [*_settings(settings, caller), *_changes(changes, caller)]
    function: Callable[..., Any] | None = None
    document: dict[str, Any]
    file = Path.cwd() / "job.toml"
    if isinstance(target, Topology):
        file = file.with_name(f"{target.job.name}.toml")
        topology = (
            overridden(target.to_open_dict(), overrides, file=f"{caller}()", name=file.stem, lines={}) if overrides else target
        )
    elif isinstance(target, (str, PathLike)) and _is_file(fspath(target), caller):
        file = Path(target).absolute()
        topology = load_overridden(Path(target), overrides)
    else:
        if isinstance(target, Mapping):
            document = _plain(target, f"{caller}()")
        elif isinstance(target, (str, PathLike)):
            document = {"job": {"task": fspath(target), "name": _name(fspath(target))}}
        elif callable(target):
            spec, folder = place_of(target, caller)
            function = target
            document = {"job": {"task": spec, "name": _name(spec), **({} if folder is None else {"python_path": [folder]})}}
        else:
            raise UsageError(
                f"{caller}() got {typed(target)}: give a topology file, a Topology, a mapping like a topology file, a "
                'task ("module:function"), or the function itself'
            )
        topology = overridden(document, overrides, file=f"{caller}()", name=file.stem, lines={})
        if function is not None and (topology.job.task != spec or (folder and folder not in topology.job.python_path)):
            raise UsageError(f"{caller}() was given the task's function, and another task or python_path: leave these out")
        file = file.with_name(f"{topology.job.name}.toml")
    return ProgramJob(topology, file, function)


def _is_file(text: str, caller: str) -> bool:
    """Whether a text is the path of a topology file, rather than a task."""
    if ":" in text or text.endswith(".py"):
        return False
    if text.endswith(".toml") or Path(text).is_file():
        return True
    raise UsageError(
        f'{caller}() got {text!r}, which is neither a topology file nor a task: write the path of a file, "module:function", or '
        '"path/to/file.py:function"'
    )


def _name(task: str) -> str:
    """A name for the runs of a task."""
    source = task.rpartition(":")[0] or task
    return job_name(Path(source).stem if source.endswith(".py") else source.rpartition(".")[2])


def _settings(settings: Mapping[str, Any], caller: str) -> list[Override]:
    """Keywords as values of the topology."""
    overrides = []
    for key, value in settings.items():
        section = next((name for name, keys in _OPEN.items() if key in keys), None)
        plain = _plain(value, f"{caller}({key}=...)")
        if section is not None:
            overrides.append(Override((section, key), plain, f"{caller}({key}={value!r})"))
        elif key in _SECTIONS and isinstance(plain, dict):
            overrides += [Override((key, inner), item, f"{caller}({key}={{{inner!r}: ...}})") for inner, item in plain.items()]
        elif key in _SECTIONS:
            overrides.append(Override((key,), plain, f"{caller}({key}=...)"))
        else:
            known = _SECTIONS.union(*_OPEN.values())
            near = did_you_mean(key, known)
            hint = f"; did you mean {near!r}?" if near else ""
            raise UsageError(
                f"{caller}() has no setting {key!r}{hint}. Keywords are the sections of a topology file and the keys of [job] and "
                f'[compute]; write others like set={{"exchange.kind": "gossip"}}'
            )
    return overrides


def _changes(changes: Mapping[str, Any], caller: str) -> list[Override]:
    overrides = []
    for key, value in changes.items():
        if not isinstance(key, str) or "." not in key:
            raise UsageError(f'{caller}(set={{{key!r}: ...}}): write section.key, like set={{"exchange.kind": "gossip"}}')
        label = f"{caller}(set={{{key!r}: {value!r}}})"
        overrides.append(Override(tuple(key.split(".")), _plain(value, label), label))
    return overrides


def _plain(value: Any, label: str) -> Any:
    """A value as TOML has it, and no part of the caller's. Raises `UsageError` if it has none."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"{label}: the key {key!r} is not a string")
        return {key: _plain(item, label) for key, item in value.items()}
    if isinstance(value, PathLike):
        return fspath(value)
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):  # numpy's numbers are some of these, but are written differently
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item, label) for item in value]
    raise UsageError(f"{label}: {typed(value)} cannot be a setting: use strings, numbers, booleans, lists and mappings")
