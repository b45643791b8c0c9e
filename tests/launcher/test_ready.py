"""Which launches of tests are forked from the process that has imported torch."""

from __future__ import annotations

import os

import pytest

from tests import environment
from tests.launcher.ready import ready_process


def test_what_a_library_leaves_in_the_environment_is_put_back() -> None:
    """A test that had compiled something left all later ones of its process to launch from nothing."""
    before = dict(os.environ)
    with environment.kept():
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": "/tmp/of-the-compiler", "OMP_NUM_THREADS": "7", "KMP_INIT_AT_FORK": "FALSE"}
        del os.environ["OMP_WAIT_POLICY"]
    assert os.environ.pop("KMP_INIT_AT_FORK") == "FALSE"  # nobody has read it
    assert dict(os.environ) == {name: value for name, value in before.items() if name != "KMP_INIT_AT_FORK"}


def test_a_launch_that_would_read_another_environment_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ready_process().serves({**os.environ, "KMP_INIT_AT_FORK": "FALSE"})
    assert not ready_process().serves({**os.environ, "TORCH_LOGS": "dynamo"})
    assert not ready_process().serves({name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"})
