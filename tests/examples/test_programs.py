"""The examples with a loop of their own, as a person starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import own_scheduler, script_join, script_session
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


def test_a_plain_script_runs_alone() -> None:
    assert script_session.main(epochs=8) > 0.9


async def test_an_asynchronous_script_runs_alone() -> None:
    assert await script_join.main(epochs=8) > 0.9


async def test_own_scheduler_trains_on_coroutines_and_a_process() -> None:
    metrics = await own_scheduler.main()
    assert metrics["eval_accuracy"] > 0.85


@pytest.mark.parametrize("script", ["script_session.py", "script_join.py"])
def test_scripts_run_on_groups_and_servers(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zmqtrain", "launch", "--run-dir", str(tmp_path / "run")]
    command += ["launch/script.toml", f"examples/{script}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "done"
    logs = "".join(file.read_text() for file in (tmp_path / "run" / "logs").glob("*.log"))
    assert float(logs.split("test accuracy ")[1].split("%")[0]) > 85
