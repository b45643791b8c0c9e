"""A process goes on where its output has nowhere to go."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S

PROGRAM = """
import os, sys
from zmqtrain.launcher.streams import survive_closed_streams
survive_closed_streams()
assert all(number < 3 or not os.get_inheritable(number) for number in [os.open(os.devnull, os.O_RDONLY)])
for line in range(3):
    print("a line", line, flush=True)
    print("an error", line, file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("how", ["nobody reads", "closed", "a full disk"])
def test_a_process_survives_the_loss_of_its_output(how: str) -> None:
    if how == "a full disk":
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    redirected = " <&- >&- 2>&-" if how == "closed" else ""
    done = subprocess.run(
        ["sh", "-c", f'exec {sys.executable} -c "$PROGRAM"{redirected}'],
        env={**os.environ, "PROGRAM": PROGRAM},
        stdout=writing,
        stderr=writing,
        timeout=PATIENCE_S,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 0
