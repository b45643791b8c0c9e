"""Modules beside a task that are not those that it gets when it imports them.

What is installed comes first in every process of a run, so that a file named ``queue.py`` or ``select.py`` beside the task breaks
no library. Python itself does it the other way round for a script. So where a task imports a name of which there are two, it would
get another module than it has beside it: an older copy of itself that was installed, or a package that happens to have that name.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from zmqtrain.errors import UsageError

#: Folders of tasks that this process has loaded, which are no places where something is installed.
OF_TASKS: set[Path] = set()


def require_own_modules(task: Path, folder: Path) -> None:
    """Raise `UsageError` if the file of a task, or a module in ``folder`` that it imports, imports a module of this folder that
    Python would find elsewhere."""
    files, seen = [task], {task.resolve()}
    while files:
        file = files.pop()
        for name in _imports(file):
            beside = beside_of(folder, name)
            if beside is None or beside in seen:
                continue
            seen.add(beside)
            require_own(name, beside, folder, f"{file.name} imports {name!r}")
            files.append(beside)


def require_own(name: str, beside: Path, folder: Path, why: str) -> None:
    """Raise `UsageError` if Python would not find the module ``name`` in ``folder``, where it is the file ``beside``."""
    spec = _spec(name)
    if name == "zmqtrain" or spec is None or spec.origin in (None, "built-in", "frozen"):
        return
    assert spec.origin is not None
    found = Path(spec.origin).resolve()
    if found != beside and not any(found.is_relative_to(other) for other in OF_TASKS):
        raise UsageError(
            f"[job] task: {why}, and there are two such modules: {beside} and {found}, which would be taken, since modules beside "
            f'a task are looked for last. Rename yours, uninstall the other, or put yours first: [job] python_path = ["{folder}"]'
        )


def beside_of(folder: Path, name: str) -> Path | None:
    """The file of the module ``name`` in a folder, if it has one."""
    paths = (folder / name / "__init__.py", folder / f"{name}.py")
    return next((path.resolve() for path in paths if path.is_file()), None)


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _imports(file: Path) -> Iterator[str]:
    """The first parts of all names that a file imports, wherever it does; none if it cannot be read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
