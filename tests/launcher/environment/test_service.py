"""The systemd unit of an agent."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from zmqtrain.launcher.kubernetes.manifest import PERMANENT

UNIT = Path(__file__).parents[3] / "launch" / "zmqtrain-agent.service"


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for line in UNIT.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found[key].append(value)
    return found


def test_what_comes_back_and_what_does_not() -> None:
    unit = settings()
    assert unit["Restart"] == ["always"]
    assert tuple(int(code) for line in unit["RestartPreventExitStatus"] for code in line.split()) == PERMANENT
    assert unit["ExecStart"] == ["/opt/zmqtrain/bin/zmqtrain agent"]


def test_systemd_understands_it(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not here")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/zmqtrain/bin/zmqtrain", sys.executable))
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert UNIT.name not in done.stderr, done.stderr
