"""What the process that a run's roles are forked from imports for a script, without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqtrain.launcher.entries import SCRIPT_ENTRY, SESSION_ENTRY, TASK_ENTRY, entry_for

JOINS = "import zmqtrain\nwith zmqtrain.session() as session:\n    session.barrier()\n"


@pytest.mark.parametrize(
    "more",
    [
        "",
        "import json, os.path\nimport torch.nn.functional as F\nfrom torch import nn\nfrom zmqtrain.errors import RunStopped\n",
        "def load():\n    import numpy as np\n    return np.zeros(3)\n",
        "from beside import Net\n",
    ],
)
def test_a_script_of_which_all_is_known_does_without_the_compiler(tmp_path: Path, more: str) -> None:
    (tmp_path / "script.py").write_text(more + JOINS)
    (tmp_path / "beside.py").write_text("import script, torch\n")
    assert entry_for(str(tmp_path / "script.py")) == SESSION_ENTRY


@pytest.mark.parametrize(
    "more",
    [
        "import torch\nmodel = torch.compile(model)\n",
        "from torch.nn.parallel import DistributedDataParallel as DDP\n",
        "import lightning\n",  # which imports it itself
        "def make():\n    from transformers import AutoModel\n",
        "from nowhere import Net\n",  # nobody knows what that does
        "import beside.net\n",
        "from . import model\n",
        "this is no Python\n",
    ],
)
def test_a_script_that_may_compile_finds_the_compiler(tmp_path: Path, more: str) -> None:
    (tmp_path / "script.py").write_text(more + JOINS)
    (tmp_path / "beside.py").write_text("import pandas\n")
    assert entry_for(str(tmp_path / "script.py")) == SCRIPT_ENTRY


def test_scripts_that_cannot_be_read_and_tasks(tmp_path: Path) -> None:
    (tmp_path / "bytes.py").write_bytes(b"\0\xff")
    assert entry_for(str(tmp_path / "bytes.py")) == entry_for(str(tmp_path / "none.py")) == SCRIPT_ENTRY
    assert entry_for(None) == TASK_ENTRY
