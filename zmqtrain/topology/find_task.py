"""Find the function that ``[job] task`` names without importing anything: an import would load torch, and run the user's code.

This only checks that the function exists; `zmqtrain.train.task` imports and calls it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from zmqtrain.errors import UsageError
from zmqtrain.topology.suggest import did_you_mean

DEFAULT_FUNCTION = "task"


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Where the task's function is defined."""

    file: Path
    function: str


def find_task(task: str, folders: Sequence[str | Path] = (".",)) -> TaskPlace:
    """The file and function that ``task`` names.

    Relative files are looked for in ``folders``, and so are modules, before the installed ones.
    Raises `UsageError`, which says what is missing and what exists instead.
    """
    source, _, function = task.partition(":")
    function = function or DEFAULT_FUNCTION
    file = _file(task, source, folders) if source.endswith(".py") else _module(task, source, folders)
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, OSError) as error:
        raise UsageError(f"[job] task = {task!r}: {file} cannot be read: {error}") from error
    names = set(_names(tree.body))
    if function not in names and "*" not in names:
        near = did_you_mean(function, names)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UsageError(f"[job] task = {task!r}: {file} has no function {function!r}{hint}")
    return TaskPlace(file, function)


def absent(folders: Sequence[str | Path]) -> str:
    """Which of the folders do not exist, in words that end a message about a module that was not found; empty if all do."""
    missing = [str(folder) for folder in folders if not Path(folder).is_dir()]
    return f" (there is no folder {' or '.join(missing)}: see [job] python_path)" if missing else ""


def _file(task: str, source: str, folders: Sequence[str | Path]) -> Path:
    tried = [Path(folder, source) for folder in folders]
    for path in tried:
        if path.is_file():
            return path
    where = "" if Path(source).is_absolute() else f" in {' or '.join(str(Path(folder).absolute()) for folder in folders)}"
    raise UsageError(f"[job] task = {task!r}: there is no file {source}{where}{absent(folders)}")


def _module(task: str, name: str, folders: Sequence[str | Path]) -> Path:
    parts = name.split(".")
    where: list[str] = [str(folder) for folder in folders]
    spec: ModuleSpec | None = None
    for number, part in enumerate(parts):
        # One part at a time, by its own name: asking for a dotted name at once would import the packages around it.
        spec = PathFinder.find_spec(part, where)
        if spec is None and number == 0:
            spec = importlib.util.find_spec(part)
        if spec is None:
            missing = ".".join(parts[: number + 1])
            if parts[-1] == "ipynb":
                raise UsageError(
                    f"[job] task = {task!r}: {name} is a notebook, which other processes cannot import. Begin the cell that makes "
                    "the task with `%%writefile FILE.py`, and name that file"
                )
            raise UsageError(
                f"[job] task = {task!r}: there is no module {missing}. Install it, or add its folder to [job] python_path"
                f"{absent(folders)}"
            )
        where = list(spec.submodule_search_locations or ())
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UsageError(f"[job] task = {task!r}: {name} is not a Python source file")
    return Path(spec.origin)


def _names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that a module's body binds; ``*`` where only an import can tell."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name for alias in aliases)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                for field in ("body", "orelse", "finalbody"):
                    yield from _names(getattr(statement, field, []))
                for handler in getattr(statement, "handlers", []):
                    yield from _names(handler.body)
            case _:
                continue
