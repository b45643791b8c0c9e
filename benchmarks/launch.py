"""``python -m benchmarks launch``: how long it takes until all roles have started and joined, and what memory they take."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.case import Case, case_of
from zmqtrain.errors import ZmqTrainError
from zmqtrain.processors import processors

ROLES = 32
#: What 32 processes that each import torch themselves take is the peer; one is measured, since they share the processors.
_IMPORT = "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"
#: The roles stay until their memory was looked at.
_SCRIPT = """
import pathlib, time, zmqtrain
with zmqtrain.session() as session:
    session.barrier()
    pathlib.Path(f"up-{session.rank}").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
"""


def bench_launch(*, roles: int = ROLES) -> Iterator[Case]:
    """Launch ``roles`` workers that only join and meet at a barrier. Raises `ZmqTrainError` if the launch fails."""
    joined, memory = _launch(roles)
    alone = float(subprocess.run([sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True).stdout)
    each = roles * alone / min(roles, processors())
    yield case_of("launch", f"{roles} roles up and joined", joined, "s", f"{roles} imports of torch on all processors", each)
    yield case_of("launch", f"memory of launcher, agent and {roles} roles", memory / 1e6, "MB")


def _launch(roles: int) -> tuple[float, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "script.py").write_text(_SCRIPT, encoding="utf-8")
        topology = f"[job]\noversubscribe = true\n[compute]\ngroups = 1\ngroup_size = {roles}\nbatch_size = {roles}\n"
        (path / "bench.toml").write_text(topology, encoding="utf-8")
        command = [sys.executable, "-m", "zmqtrain", "launch", "--json", "--run-dir", "run", "bench.toml", "script.py"]
        start = time.perf_counter()
        joined, memory = None, 0
        with subprocess.Popen(command, cwd=path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if json.loads(line)["kind"] == "running":
                    joined = time.perf_counter() - start
                    while len(list(path.glob("up-*"))) < roles and process.poll() is None:
                        time.sleep(0.05)
                    memory = _memory(process.pid)
                    (path / "go").touch()
            assert process.stderr is not None
            errors = process.stderr.read()
        if process.returncode != 0 or joined is None:
            raise ZmqTrainError(f"the launch failed with code {process.returncode}: {errors[-2000:]}")
        return joined, memory


def _memory(pid: int) -> int:
    """Bytes that a process and all below it take; pages that they share count once."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    total = 0
    for process in processes:
        try:
            info = process.memory_full_info()
        except psutil.Error:
            continue
        total += getattr(info, "pss", info.uss)
    return total
