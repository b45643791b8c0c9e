"""A worker needs no more than one model's memory beyond model, gradients and activations."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import PATIENCE_S

PROGRAM = """
import asyncio, sys, psutil, torch
from torch import nn
from torch.utils.data import TensorDataset
sys.path.insert(0, ".")
from tests.train.world import Recipe, run, topology_of

WIDTH, LAYERS = 2048, 12   # 16 MiB a layer
def model():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

process = psutil.Process()
peak = 0
class Watched(nn.Module):
    def forward(self, output):
        global peak
        peak = max(peak, process.memory_info().rss)
        return output

def watched():
    return nn.Sequential(*model(), Watched())

# torch loads a good deal of itself when it first trains anything: that is not the worker's.
asyncio.run(run(topology_of(job={"steps": 2}, compute={"batch_size": 8}), Recipe()))
recipe = Recipe(torch.float32, model=watched, optimizer=lambda p: torch.optim.SGD(p, lr=1e-4), eval_data=None,
                train_data=TensorDataset(torch.zeros(8, WIDTH), torch.zeros(8, dtype=torch.long)))
before = process.memory_info().rss
result = asyncio.run(run(topology_of(job={"steps": 6}, compute={"batch_size": 8, "bucket_size": 4 << 20}), recipe))
assert not result.errors, result.errors
size = 4 * WIDTH * WIDTH * LAYERS
extra = max(peak, process.memory_info().rss) - before - 2 * size
print(extra / 2**20, size / 2**20)
# Besides the copy: a few gradients on their way, and what the allocator has not given back yet.
assert extra <= size + (96 << 20), (extra, size)
"""


def test_extra_memory_of_a_worker() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
