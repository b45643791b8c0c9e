"""What Python and torch read in the environment when they are imported, kept as it was before the first test.

Launches of tests are forked from a process that has imported both (`tests.launcher.ready`), if they would read the same. Libraries
write to the environment of whoever imports or calls them, as torch's compiler does with the folder of its cache: what is left of
that would make launches of all later tests start from nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_NAMES = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "ATEN_", "ONEDNN_", "TORCH", "CUDA_", "ZMQTRAIN_TEST_DEVICE")
#: Of these, what is not read then.
_BUT = ("PYTHONUNBUFFERED",)

#: The whole environment before the first test; empty until then.
BEFORE: dict[str, str] = {}


def read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that is read when Python or torch are imported."""
    return {name: value for name, value in environ.items() if name.startswith(_NAMES) and name not in _BUT}


@contextmanager
def kept() -> Iterator[None]:
    """Afterwards that part is as it was before."""
    before = read_at_import(os.environ)
    try:
        yield
    finally:
        after = read_at_import(os.environ)
        if after != before:
            for name in after.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
