"""The examples with Lightning, Accelerate and transformers, each as two ranks; Accelerate's by its launcher, which is torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launcher.ready import PYTHON, Program
from tests.patience import PATIENCE_S
from zmqtrain.arena import shared_memory_missing

pytestmark = pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROGRAM = Path(__file__).with_name("program.py")


def needs(*packages: str) -> None:
    """Skip if one of these is not installed. They are not imported here: that alone takes seconds."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def printed(packages: Sequence[str], example: str, *arguments: str, every: int = 1) -> str:
    """What the example's rank 0 prints.

    Args:
        packages: what the process imports that forks both ranks, and was itself forked by one that has imported torch.
        example, arguments: the file, and its own.
        every: it trains on every image of so many.
    """
    words = (PYTHON, str(PROGRAM), f"--ranks={','.join(('torch._dynamo', *packages))}", str(EXAMPLES / example), *arguments)
    program = Program(words, EXAMPLES, {**os.environ, "EVERY": str(every)})
    said, errors = program.communicate(2 * PATIENCE_S)
    assert program.returncode == 0, said + errors
    return said


def accuracies(text: str) -> dict[str, float]:
    return {kind: float(percent) for kind, percent in re.findall(r"(\w+): accuracy ([\d.]+)%", text)}


def test_lightning_trains_validates_stops_and_saves() -> None:
    needs("lightning", "sklearn")
    found = accuracies(printed(["lightning", "sklearn.datasets"], "lightning_digits.py", "model_server", "averaging", every=3))
    assert set(found) == {"model_server", "averaging"}
    assert min(found.values()) > 30, found  # of ten digits; how far apart groups run depends on the machine


def test_transformers_trainer_with_groups() -> None:
    needs("accelerate", "transformers", "sklearn")
    found = accuracies(
        printed(
            ["transformers.trainer", "transformers.models.vit.modeling_vit", "sklearn.datasets"],
            "transformers_digits.py",
            "model_server",
            every=2,
        )
    )
    assert set(found) == {"model_server"}
    assert min(found.values()) > 25, found


def test_accelerate() -> None:
    """Its launcher starts torchrun, here without GPUs."""
    needs("accelerate", "sklearn")
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    environ = {**os.environ, "EVERY": "3", "PYTHONPATH": f"{ROOT}:{EXAMPLES}", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *launcher, str(PROGRAM), str(EXAMPLES / "accelerate_digits.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    assert "with 2 ranks" in text
    assert float(text.split("accuracy ")[1].split("%")[0]) > 60
