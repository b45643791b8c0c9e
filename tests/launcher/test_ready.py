"""Which launches of tests are forked from the process that has imported torch."""

from __future__ import annotations

import os

from tests.launcher.ready import ready_process


def test_what_torchs_compiler_sets_makes_no_other_environment() -> None:
    """A test that has compiled something left all later ones of its process to launch from nothing."""
    assert ready_process().serves({**os.environ, "TORCHINDUCTOR_CACHE_DIR": "/tmp/of-the-compiler"})
    assert not ready_process().serves({**os.environ, "OMP_NUM_THREADS": "7"})
