"""The examples with a loop of their own, as a person starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", ["script_session.py", "script_join.py"])
def test_scripts_run_alone(script: str) -> None:
    output = run(sys.executable, f"examples/{script}")
    assert float(output.split()[-1].rstrip("%")) > 90


@pytest.mark.parametrize("script", ["script_session.py", "script_join.py"])
def test_scripts_run_on_groups_and_servers(script: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "zmqtrain", "launch", "--run-dir", str(tmp_path / "run")]
    run(*launch, "launch/script.toml", f"examples/{script}")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "done"
    logs = "".join(file.read_text() for file in (tmp_path / "run" / "logs").glob("*.log"))
    assert float(logs.split("test accuracy ")[1].split("%")[0]) > 85


def test_own_scheduler_trains_on_coroutines_and_a_process() -> None:
    output = run(sys.executable, "examples/own_scheduler.py")
    assert "eval_accuracy" in output
