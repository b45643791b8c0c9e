"""``python -m benchmarks memory``: what one worker takes of memory for a transformer of 200 million parameters, on Pr x 1 grids.

A real launch for each grid: AdamW, so four numbers a parameter, on batches so small that activations count for little. The kernel
says the most that a worker has had in memory (``VmHWM``), torch's code included, which a tiny model shows alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.case import Case, case_of
from zmqtrain.errors import ZmqTrainError

ROWS = (1, 2, 4)
#: Width and layers: 12 width² parameters a layer.
LARGE, TINY = (1024, 16), (64, 1)
STEPS = 2
#: How often peaks are read; the kernel keeps them, so only what a worker takes in its last moments can be missed.
EVERY_S = 0.05

_TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from zmqtrain import Task

TOKENS = 256


class Transformer(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.out = nn.Linear(width, TOKENS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(1))


def task(width, layers):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(TOKENS, (64, 8), generator=generator)
    return Task(
        model=lambda: Transformer(width, layers),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-4),
        train_data=TensorDataset(inputs, inputs[:, 0]),
    )
"""
_TOPOLOGY = """
[job]
task = "task.py:task"
args = {{ width = {width}, layers = {layers} }}
steps = {steps}
checkpoint_every = 0
oversubscribe = true
[compute]
group_size = {rows}
batch_size = 4
grid = "{rows}x1"
[parallel]
verify = false
"""


def bench_memory(*, rows: Sequence[int] = ROWS, large: tuple[int, int] = LARGE) -> Iterator[Case]:
    """The peak of the worker that takes most, for each number of rows. Raises `ZmqTrainError` if a launch fails."""
    code = peak_bytes(1, *TINY)
    yield case_of("memory", "a worker without a model to speak of", code / 1e6, "MB")
    alone: float | None = None
    for count in rows:
        peak = peak_bytes(count, *large) - code
        alone = alone or peak * count
        case = f"{12 * large[0] ** 2 * large[1] / 1e6:.0f} M parameters, {count}x1: the model's share of a worker's peak"
        yield case_of("memory", case, peak / 1e6, "MB", f"1x1, divided by {count}", alone / count / 1e6)


def peak_bytes(rows: int, width: int, layers: int) -> int:
    """The largest peak of a worker in a launched run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "task.py").write_text(_TASK, encoding="utf-8")
        topology = _TOPOLOGY.format(rows=rows, width=width, layers=layers, steps=STEPS)
        (path / "bench.toml").write_text(topology, encoding="utf-8")
        command = [sys.executable, "-m", "zmqtrain", "launch", "--run-dir", "run", "bench.toml"]
        with open(path / "output", "wb") as output:
            process = psutil.Popen(command, cwd=path, stdout=output, stderr=subprocess.STDOUT)
        peaks: dict[int, int] = {}
        while True:
            try:
                process.wait(EVERY_S)
                break
            except psutil.TimeoutExpired:
                for each in process.children(recursive=True):
                    peaks[each.pid] = max(peaks.get(each.pid, 0), _peak(each.pid))
        if process.returncode != 0:
            text = (path / "output").read_text(encoding="utf-8", errors="replace")
            raise ZmqTrainError(f"the launch on {rows}x1 failed with code {process.returncode}: {text[-2000:]}")
        return max(peaks.values(), default=0)


def _peak(pid: int) -> int:
    """The most memory that a process has had, in bytes; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
