"""What needs a device with memory of its own, on the stand-in: `tests/device` in a process that torch knows it in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.apart import missing
from tests.patience import LIMIT_S

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.timeout(LIMIT_S)
def test_the_tests_of_devices_pass_on_the_stand_in() -> None:
    environment = {**os.environ, "ZMQTRAIN_TEST_DEVICE": "apart", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/device"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S - 10)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
