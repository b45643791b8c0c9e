"""Loader processes that are not forked get the classes of a file that was loaded under a name that no import finds."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from zmqtrain.data.file_modules import load_file
from zmqtrain.data.loader import Fetch, Loader, Reader
from zmqtrain.data.processes import Processes

SOURCE = """
import torch

class Samples:
    ready = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.full((1,), float(index)), self.ready

def begin(number):
    torch.utils.data.get_worker_info().dataset.ready = 7
"""


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
async def test_a_file_s_dataset_in_a_process_that_is_no_fork(context: str, tmp_path: Path) -> None:
    file = tmp_path / "samples.py"
    file.write_text(SOURCE)
    module = load_file("loaded_from_a_file", file)
    try:
        processes = Processes(num_workers=1, multiprocessing_context=context, worker_init_fn=module.begin)
        loader = Loader(Fetch(Reader(module.Samples())), lambda step: np.array([2, 0]), (1,), processes=processes)
        batch = await loader.batch(0)
        assert batch.inputs[0].flatten().tolist() == [2, 0]
        assert batch.target.tolist() == [7, 7]
        await loader.close(20)
    finally:
        del sys.modules["loaded_from_a_file"]


def test_a_file_that_raises_is_no_module(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        load_file("a_broken_file", file)
    assert "a_broken_file" not in sys.modules
