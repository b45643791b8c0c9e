"""The backend as torch knows it, alone and beside another for GPUs."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

from zmqtrain.c10d.register import register


def test_it_is_there_for_both_kinds_of_devices() -> None:
    register()
    assert dist.Backend.backend_capability["zmq"] == ["cpu", "cuda"]
    assert BackendConfig(dist.Backend("zmq")).get_device_backend_map() == {"cpu": "zmq", "cuda": "zmq"}


def test_gpus_may_have_nccl_beside_it() -> None:
    register()
    assert BackendConfig(dist.Backend("cpu:zmq,cuda:nccl")).get_device_backend_map() == {"cpu": "zmq", "cuda": "nccl"}
