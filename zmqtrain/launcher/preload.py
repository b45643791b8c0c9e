"""What a fork server imports for the roles that it will fork (``[job] preload``), in its own process: they then share it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module

from zmqtrain.launcher.one_thread import threads


def preload(modules: Sequence[str], folders: Sequence[str], environ: Mapping[str, str], seed: int) -> str:
    """Import modules as a role would that has these folders at the front of its path, these variables, and the job's seed.

    Returns why a role cannot have them from this process; nothing if all is well.
    """
    with _like_a_role(folders, environ):
        for name in modules:
            try:
                from zmqtrain.train.random_state import imported, seed_everything  # torch, as a role imports it

                seed_everything(seed)
                module = imported(name, partial(import_module, name))
                getattr(module, "__path__", None)  # of the compiler that is postponed, this imports the real one
            except BaseException as error:  # noqa: BLE001 - SystemExit, too: it must not end the roles of this host
                return f"{name} cannot be imported: {type(error).__name__}: {error}"
            if threads() != 1:
                return f"{name} starts threads when it is imported, and a process with threads must not be forked"
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_initialized():
                return f"{name} begins to use CUDA when it is imported, and a process that does must not be forked"
    return ""


@contextmanager
def _like_a_role(folders: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
    path, before = list(sys.path), {name: os.environ.get(name) for name in environ}
    sys.path[:0] = folders
    os.environ.update(environ)
    gc.disable()  # imports produce no garbage
    try:
        yield
    finally:
        gc.freeze()  # collections in the roles would copy its pages
        gc.enable()
        sys.path[:] = path
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
