"""``make test-gpu``: all that needs a GPU, on a machine that has one, torch, and perhaps nothing else and no package index.

What is missing can be brought as wheels in a folder; they are unpacked beside, and nothing is installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 480
#: What is imported, and what it is called where packages come from.
NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "zmq": "pyzmq",
    "msgpack": "msgpack",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "rich": "rich",
    "safetensors": "safetensors",
    "typer": "typer",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}
#: Without which less is tested, or it is slower.
BETTER = {"uvloop": "uvloop", "sklearn": "scikit-learn"}
TESTS = ("tests/device", "tests/train/test_devices.py", "tests/wire/test_payloads.py")


def fits(wheel: str) -> bool:
    """Whether a wheel of this name is for this interpreter and machine."""
    _, python, _, place = wheel.removesuffix(".whl").rsplit("-", 3)
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    right_python = own in python or "py3" in python or ("abi3" in wheel and python.startswith("cp3"))
    return right_python and (place == "any" or platform.machine() in place)


def unpack(folder: Path, into: Path) -> None:
    """All wheels that fit, but torch, which the machine has."""
    for wheel in sorted(folder.glob("*.whl")):
        done = into / f".{wheel.name}"
        if not fits(wheel.name) or wheel.name.startswith(("torch-", "nvidia_")) or done.exists():
            continue
        with zipfile.ZipFile(wheel) as file:
            file.extractall(into)
        done.touch()


def missing(names: dict[str, str]) -> list[str]:
    """Of these, as packages are called."""
    return [package for module, package in names.items() if find_spec(module) is None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-gpu", description=__doc__)
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="a folder of wheels to unpack (default: wheels)")
    arguments, options = parser.parse_known_args()
    found = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if arguments.wheels.is_dir():
        unpacked = ROOT / ".gpu-wheels"
        unpacked.mkdir(exist_ok=True)
        unpack(arguments.wheels, unpacked)
        sys.path.append(str(unpacked))
        found.append(str(unpacked))
    # For the processes that tests start, too: the package itself need not be installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(found)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    lacking = missing(NEEDED)
    if lacking:
        words = " ".join(sorted(set(lacking + missing(BETTER)) - {"torch"}))
        print(f"{sys.executable} has no {', '.join(lacking)}.")
        if "torch" in lacking:
            print("torch must be there already, made for this machine's GPU.")
        print(
            "On a machine with a package index:\n"
            f"  python3 -m pip download -d wheels --only-binary=:all: --python-version {python} "
            f"--platform manylinux_2_28_{platform.machine()} --platform manylinux2014_{platform.machine()} {words}\n"
            f"Copy the folder to {ROOT}/wheels and run it again; nothing is installed."
        )
        return 2
    import torch

    if not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} sees no CUDA device here; without one tests/test_apart.py runs these tests on a stand-in."
        )
        return 2
    for number in range(torch.cuda.device_count()):
        print(f"cuda:{number}: {torch.cuda.get_device_name(number)}")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {python}")
    for package in missing(BETTER):
        print(f"without {package}")
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--durations=10",
        "-m",
        "gpu",
        *TESTS,
        *options,
    ]
    environment = {**os.environ, "ZMQTRAIN_TEST_DEVICE": "cuda", "OMP_NUM_THREADS": "2"}
    try:
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        print(f"not done within {LIMIT_S} s")
        return 1
    print(f"{time.monotonic() - began:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
