"""Modules that were loaded from a file, under a name that no import finds, as those of tasks are; and what other processes need
of them.

A process that is not forked imports the modules of what it is sent by their names, so their files' paths have to come along.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_FILES: dict[str, str] = {}
"""The files of the modules that `load_file` has loaded here."""


def load_file(name: str, file: Path) -> ModuleType:
    """Load a file as the module ``name``, in place of one with this name. Raises what the file raises, and then there is none."""
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # needed by dataclasses, and to pickle the file's classes
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _FILES[name] = str(file)
    return module


class Files:
    """These modules. Pickled before objects of their classes, it lets another process unpickle those: it loads the files first."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, ({name: file for name, file in _FILES.items() if name in sys.modules},)


def _load(files: dict[str, str]) -> Files:
    for name, file in files.items():
        if name not in sys.modules:
            load_file(name, Path(file))
    return Files()
