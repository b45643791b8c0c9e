"""Each process of a run of tests compiles its share of the test files before pytest reads them, so that no file is compiled twice.

pytest rewrites assertions when it compiles a test file, and keeps the result beside the file. On a fresh clone this takes ten
seconds of processor time for all files; the processes of xdist read the same files in the same order at the same time, so that each
of them would do it for nearly all.
"""

from __future__ import annotations

import sys

import pytest
from _pytest.assertion import rewrite


def compile_share(config: pytest.Config, number: int, count: int) -> int:
    """Compile the test files that no process has compiled yet, but only every ``count``-th.

    Args:
        config: pytest's, of the run.
        number: which of the files: those at ``number``, ``number + count``, and so on, in the order of their names.
        count: how many processes share the files.

    Returns:
        How many files were compiled: none where Python is told to keep nothing that it compiles.
    """
    if sys.dont_write_bytecode:
        return 0
    done = 0
    for file in sorted(config.rootpath.joinpath("tests").rglob("test_*.py"))[number::count]:
        folder = rewrite.get_cache_dir(file)
        compiled = folder / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(folder):
            stat, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, compiled)
            done += 1
    return done
