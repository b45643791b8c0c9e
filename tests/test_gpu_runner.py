"""``make test-gpu`` says what is missing, and takes what was brought."""

from __future__ import annotations

import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.device.__main__ import NEEDED, fits, missing, unpack
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
OWN = f"cp{sys.version_info.major}{sys.version_info.minor}"


@pytest.mark.parametrize(
    ("wheel", "due"),
    [
        ("rich-13.9.4-py3-none-any.whl", True),
        ("six-1.16-py2.py3-none-any.whl", True),
        (f"msgpack-1.1-{OWN}-{OWN}-manylinux2014_{platform.machine()}.whl", True),
        (f"psutil-6.0-cp36-abi3-manylinux2014_{platform.machine()}.whl", True),
        (f"msgpack-1.1-{OWN}-{OWN}-win_amd32.whl", False),
        (f"msgpack-1.1-cp27-cp27-manylinux2014_{platform.machine()}.whl", False),
    ],
)
def test_wheels_for_this_machine(wheel: str, due: bool) -> None:
    assert fits(wheel) == due


def test_wheels_are_unpacked_once_and_torch_is_the_machines_own(tmp_path: Path) -> None:
    for name in ("one", "torch"):
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as file:
            file.writestr(f"{name}.py", "")
    into = tmp_path / "into"
    into.mkdir()
    for _ in range(2):
        unpack(tmp_path, into)
        assert {path.name for path in into.glob("*.py")} == {"one.py"}
        (into / "one.py").touch()


def test_what_is_missing_is_named_as_packages_are_called() -> None:
    assert missing({"zmqtrain": "zmqtrain", "nowhere_to_be_found": "Nowhere"}) == ["Nowhere"]
    assert not missing(NEEDED)


def test_a_bare_interpreter_is_told_what_to_bring() -> None:
    code = (
        "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; import runpy; runpy.run_module('tests.device')"
    )
    code = code.replace("'tests.device'", "'tests.device', run_name='__main__'")
    command = [sys.executable, "-S", "-c", code, "--wheels", "nowhere"]
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2, done.stderr
    assert "has no torch, numpy, pyzmq" in done.stdout
    assert "pip download -d wheels" in done.stdout
