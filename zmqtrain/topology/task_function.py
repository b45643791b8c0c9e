"""The name under which workers import a function that a program gives as a task."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from sysconfig import get_path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.words import typed


def place_of(function: Callable[..., Any], caller: str) -> tuple[str, str | None]:
    """What ``[job] task`` must be for this function, and the folder that ``[job] python_path`` needs for it, if any.

    Workers are other processes, often on other machines, and nothing is pickled: they import the function. Raises `UsageError` if
    they cannot; it names ``caller``, the function that was called.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise UsageError(
            f"{caller}() got {typed(function)} as its task: give the function that returns the zmqtrain.Task, "
            'or its name, "module:function", since workers import it'
        )
    if not name.isidentifier():
        raise UsageError(
            f"{caller}() cannot use {name} of {module} as a task: workers import it by its name, so it must be a function of a "
            "module, not one within another function or a class, and no lambda"
        )
    return _in_main(function, name, caller) if module == "__main__" else _in_module(function, module, name, caller)


def _in_main(function: Callable[..., Any], name: str, caller: str) -> tuple[str, str | None]:
    """A function of the program itself, which workers can import if it is a file."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    code = getattr(function, "__code__", None)
    defined = None if code is None else Path(code.co_filename)
    if file is None or defined is None or defined.suffix != ".py" or defined.resolve() != Path(file).resolve():
        raise UsageError(
            f"{caller}() cannot use {name} as a task: it was defined in a notebook or at a prompt, where workers, which are other "
            "processes, cannot import it. Put it into a file with what it imports (in a notebook: make %%writefile task.py the "
            f'first line of the cell), and give {caller}() "task.py:{name}"'
        )
    return f"{_short(Path(file))}:{name}", None


def _in_module(function: Callable[..., Any], module: str, name: str, caller: str) -> tuple[str, str | None]:
    loaded = sys.modules.get(module)
    source = getattr(loaded, "__file__", None)
    if getattr(loaded, name, None) is not function or source is None or not source.endswith(".py"):
        raise UsageError(
            f"{caller}() cannot use {name} as a task: workers import it by its name, and {module} has no source file in which "
            "that name is this very function"
        )
    file = Path(source).resolve()
    package = file.name == "__init__.py"
    if (file.parent.name if package else file.stem) != module.rpartition(".")[2]:
        return f"{_short(file)}:{name}", None  # it was loaded as a file
    root = file.parents[module.count(".") + package]
    return f"{module}:{name}", None if root in _known() else str(root)


def _known() -> set[Path]:
    """The folders in which workers look for modules in any case. What this program has put on its search path is not among them."""
    installed = [get_path("purelib"), get_path("platlib")]
    variable = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return {Path(folder).resolve() for folder in (".", *installed, *variable)}


def _short(file: Path) -> str:
    """A path as workers look for it, from the current folder: their hosts may have that folder elsewhere."""
    file, here = file.resolve(), Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)
