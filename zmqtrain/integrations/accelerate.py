"""Accelerate, and the Trainer of transformers that is built on it, over the ``zmq`` backend::

    from zmqtrain.integrations.accelerate import init_process_group

    init_process_group()            # before Accelerator(...) or TrainingArguments(...)

Accelerate uses the process group that it finds. For processors it has a list of backends of its own, so that ``ddp_backend="zmq"``
and ``InitProcessGroupKwargs(backend="zmq")`` are refused there, or leave each process to train alone.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import get_cpu_distributed_information

from zmqtrain.c10d.register import BACKEND, register
from zmqtrain.errors import UsageError


def init_process_group(**options: Any) -> None:
    """Make the process group. Does nothing in a program that was not started as several processes.

    Started by torchrun, ``accelerate launch`` or mpirun. Where there is no GPU, Accelerate is told to use processors.
    ``options``: further arguments of `torch.distributed.init_process_group`.

    Raises `UsageError` if Accelerate has begun already.
    """
    if PartialState._shared_state:
        raise UsageError("call init_process_group() before the first Accelerator(...), PartialState(...) or TrainingArguments(...)")
    place = get_cpu_distributed_information()
    if place.world_size == 1 and "LOCAL_RANK" not in os.environ:
        return
    # mpirun sets others; Accelerate translates them later than here.
    os.environ.setdefault("RANK", str(place.rank))
    os.environ.setdefault("WORLD_SIZE", str(place.world_size))
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(place.local_world_size))
    if not torch.cuda.is_available():
        # Otherwise it looks for GPUs, finds none, and takes each process for the only one.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    register()
    dist.init_process_group(BACKEND, **options)
