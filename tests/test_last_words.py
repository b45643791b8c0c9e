"""A worker of xdist that dies fails its test, says why, and keeps nobody waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]


def test_what_a_dying_worker_has_printed_is_shown(tmp_path: Path) -> None:
    dies = 'import os\ndef test_dies():\n    os.write(2, b"Bad file descriptor (epoll.cpp)")\n    os.abort()\n'
    (tmp_path / "test_one.py").write_text("def test_before(): pass\n" + dies + "def test_after(): pass\n")
    (tmp_path / "test_two.py").write_text("def test_well(): pass\n")
    options = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("DIST := ")).split()[2:]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.last_words", "-p", "no:cacheprovider", "-n", "1", *options, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1, done
    assert "has printed last:\nBad file descriptor (epoll.cpp)" in done.stdout, done
    assert "crashed while running 'test_one.py::test_dies'" in done.stdout
    assert "Fatal Python error: Aborted" in done.stderr
