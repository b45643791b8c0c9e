"""A few of the loops in real processes: shared memory, ZeroMQ, and what a person sees of a refusal."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import zmqtrain
from tests.launcher.launched import Launched
from zmqtrain.train.random_state import seed_everything

TOPOLOGY = """
[job]
timeout = "30 s"
oversubscribe = true
[compute]
groups = 2
group_size = 2
batch_size = 10
threads = 1
parts = [2, 3]
[exchange]
"""

MODEL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(100, 6, generator=generator, dtype=torch.float64), torch.arange(100) % 3)
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""

#: Clips, and has uneven parts of each batch.
CLIPS = f"""
import random
import numpy as np
import zmqtrain
drawn = [random.random(), np.random.rand()]  # as a split of the data would be: the same on all workers
{MODEL}
with zmqtrain.session() as session:
    session.replicate(model, optimizer)
    for epoch in range(2):
        for inputs, target in session.batches(data, epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
np.save(f"drawn-{{session.rank}}.npy", drawn)
np.save(f"rank-{{session.rank}}.npy", torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy())
"""

NOISY = f"""
import zmqtrain
{MODEL}
with zmqtrain.session() as session:
    session.replicate(model, optimizer)
    generator = torch.Generator().manual_seed(session.rank)
    for inputs, target in session.batches(data):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        for parameter in model.parameters():
            parameter.grad += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()
"""


def clipped_in_one_process() -> torch.Tensor:
    found: dict[str, object] = {}
    exec(MODEL, found)
    data, model, optimizer = found["data"], found["model"], found["optimizer"]
    assert isinstance(data, TensorDataset)
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    with zmqtrain.session() as session:  # for the order of samples only
        batches = [batch for epoch in range(2) for batch in session.batches(data, epoch, batch_size=20)]
    for inputs, target in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("exchange", ['kind = "allreduce"', 'kind = "model_server"\nstaleness = "sync"\nshards = 2'])
def test_a_clipped_loop_is_one_process(tmp_path: Path, exchange: str) -> None:
    (tmp_path / "trial.toml").write_text(TOPOLOGY + exchange)
    (tmp_path / "script.py").write_text(CLIPS)
    with Launched(tmp_path, "trial.toml", "script.py") as launched:
        assert launched.end() == 0, repr(launched)
    whole = clipped_in_one_process()
    for rank in range(4):
        ours = torch.from_numpy(np.load(tmp_path / f"rank-{rank}.npy"))
        torch.testing.assert_close(ours, whole, rtol=1e-11, atol=1e-13)
    drawn = [np.load(tmp_path / f"drawn-{rank}.npy").tolist() for rank in range(4)]
    seed_everything(1)
    assert drawn == [[random.random(), np.random.rand()]] * 4


def test_a_refusal_reaches_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "trial.toml").write_text(TOPOLOGY + 'kind = "allreduce"')
    (tmp_path / "script.py").write_text(NOISY)
    with Launched(tmp_path, "trial.toml", "script.py") as launched:
        assert launched.end() == 3, repr(launched)
    assert "not in the same way on all workers" in launched.error_text
