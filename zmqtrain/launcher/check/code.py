"""What `zmqtrain check` finds by importing: whether the task is valid, and whether torch has the devices that the file asks for.

It runs the task's own code, as a worker would: the import, and the task's function, which may read its data.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout

from zmqtrain.data.partition import Partition
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.launcher.check.file import Finding
from zmqtrain.topology.schema import Topology
from zmqtrain.train.data_path import data_path_of

_CUDA = re.compile(r"cuda:(\d+)")


def look_at_code(topology: Topology, data: str | None) -> Iterator[Finding]:
    """Return the findings. ``data``: the value of ``--data`` at the launch."""
    yield from _task(topology, data)
    yield from _devices(topology)


def _task(topology: Topology, data: str | None) -> Iterator[Finding]:
    from zmqtrain.train.metrics import require_metric
    from zmqtrain.train.task import task_of_job

    job = topology.job
    if job.task is None or not topology.trains:
        return
    try:
        with redirect_stdout(sys.stderr):  # what the task prints must not mix with our rows
            task = task_of_job(job, data_path_of(data, topology))
        require_metric(task, job)
        source = task.training()
        compute, data_settings = topology.compute, topology.data
        source.require(compute.batch_size, data_settings.shuffle)
        if not source.stream and data_settings.shuffle != "ring" and isinstance(compute.groups, int):  # else the run divides them
            Partition(source.samples, compute.groups, compute.group_size, compute.batch_size, job.seed)
    except UsageError as error:
        yield Finding("load", False, str(error))
    except TaskError as error:
        yield Finding("load", False, f"{error}{_where(error.__cause__)}")
    else:
        samples = ", a stream of samples to train on" if source.stream else f", {source.samples:,} samples to train on"
        yield Finding("load", True, f"{job.task} returns a task{samples}")


def _where(error: BaseException | None) -> str:
    """The innermost line of the code that raised."""
    trace = None if error is None else error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"


def _devices(topology: Topology) -> Iterator[Finding]:
    wanted = topology.compute.device
    named = {device for host in topology.hosts for device in host.devices} if wanted in ("auto", "cuda") else set()
    numbers = sorted(int(match[1]) for device in named if (match := _CUDA.fullmatch(device)))
    if wanted != "cuda" and not numbers:
        return
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    what = 'device = "cuda"' if wanted == "cuda" else f'devices = ["cuda:{numbers[-1]}"]'
    if there == 0:
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        yield Finding(
            "device", False, f"{what}, but {why} ({torch.__version__})", 'set device = "cpu", or install a torch with CUDA'
        )
    elif numbers and numbers[-1] >= there:
        yield Finding("device", False, f'devices name "cuda:{numbers[-1]}", but torch finds {there} here, numbered from cuda:0')
    else:
        yield Finding("device", True, f"torch finds {there} CUDA device{'s' * (there > 1)} here")
