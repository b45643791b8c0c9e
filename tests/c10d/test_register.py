"""The backend as torch knows it and finds it, alone and beside another for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

import zmqtrain
from tests.patience import PATIENCE_S
from zmqtrain.arena import shared_memory_missing
from zmqtrain.c10d.register import register


def test_it_is_there_for_both_kinds_of_devices() -> None:
    register()
    assert dist.Backend.backend_capability["zmq"] == ["cpu", "cuda"]
    assert BackendConfig(dist.Backend("zmq")).get_device_backend_map() == {"cpu": "zmq", "cuda": "zmq"}


def test_gpus_may_have_nccl_beside_it() -> None:
    register()
    assert BackendConfig(dist.Backend("cpu:zmq,cuda:nccl")).get_device_backend_map() == {"cpu": "zmq", "cuda": "nccl"}


USE = """
dist.init_process_group("{backend}", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert dist.group.WORLD._get_backend(tensor.device).name() == "zmq"
dist.destroy_process_group()
"""
FOUND = """
import sys
import torch
import torch.distributed as dist
ours = {name for name in sys.modules if name.partition(".")[0] == "zmqtrain"}
assert ours == {"zmqtrain", "zmqtrain.c10d", "zmqtrain.c10d.register"}, f"nobody asked for {ours}"
assert "zmq" not in sys.modules and "pydantic" not in sys.modules
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
"""
FIRST = """
import zmqtrain.c10d
import torch
import torch.distributed as dist
"""


@pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))
@pytest.mark.parametrize(
    ("program", "autoload"),
    [
        (FOUND + USE.format(backend="zmq"), "1"),
        (FIRST + USE.format(backend="cpu:zmq"), "1"),
        (FIRST + USE.format(backend="zmq"), "0"),
    ],
    ids=["found by torch", "imported before torch", "not looked for"],
)
def test_an_installed_package_is_all_that_programs_need(tmp_path: Path, program: str, autoload: str) -> None:
    install(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def install(folder: Path) -> None:
    """What an installation of these sources leaves: it counts before that of the environment, which may be older."""
    sources = Path(zmqtrain.__file__).parents[1]
    points = tomllib.loads((sources / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    info = folder / f"zmqtrain-{zmqtrain.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: zmqtrain\nVersion: {zmqtrain.__version__}\n")
    (info / "entry_points.txt").write_text("[torch.backends]\n" + "".join(f"{name} = {at}\n" for name, at in points.items()))
    (folder / "zmqtrain").symlink_to(sources / "zmqtrain")
