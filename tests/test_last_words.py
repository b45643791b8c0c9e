"""A worker of xdist that dies, or stays, fails its test, says why, and keeps nobody waiting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]


def _run(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The tests of ``tmp_path``, as `make test` runs ours."""
    makefile = (ROOT / "Makefile").read_text().splitlines()
    options += tuple(next(line for line in makefile if line.startswith("DIST := ")).split()[2:])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.last_words", "-p", "no:cacheprovider", "-n", "1", *options, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_what_a_dying_worker_has_printed_is_shown(tmp_path: Path) -> None:
    dies = 'import os\ndef test_dies():\n    os.write(2, b"Bad file descriptor (epoll.cpp)")\n    os.abort()\n'
    (tmp_path / "test_one.py").write_text("def test_before(): pass\n" + dies + "def test_after(): pass\n")
    (tmp_path / "test_two.py").write_text("def test_well(): pass\n")
    done = _run(tmp_path)
    assert done.returncode == 1, done
    assert "has printed last:\nBad file descriptor (epoll.cpp)" in done.stdout, done
    assert "crashed while running 'test_one.py::test_dies'" in done.stdout
    assert "Fatal Python error: Aborted" in done.stderr


def test_a_test_that_its_limit_does_not_end_ends_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import tests.patience\ntests.patience.LIMIT_S = tests.patience.LAST_S = 1.0\n"
        "from tests.patience import pytest_timeout_cancel_timer, pytest_timeout_set_timer\n"
    )
    stays = "import time\ndef test_stays():\n  while True:\n    try: time.sleep(60)\n    except BaseException: pass\n"
    (tmp_path / "test_one.py").write_text("def test_before(): pass\n" + stays)
    done = _run(tmp_path, "--timeout=0.5")
    assert done.returncode == 1, done
    assert "crashed while running 'test_one.py::test_stays'" in done.stdout, done
    assert re.search(r"has printed last:\nTimeout \(0:00:02\)!\n.*in test_stays\n", done.stdout, re.DOTALL), done
