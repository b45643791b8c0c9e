"""Makes the device that a role's placement names."""

from __future__ import annotations

import torch

from zmqtrain.errors import UsageError
from zmqtrain.heap import keep_memory
from zmqtrain.membership.context import RoleContext
from zmqtrain.train.device.accelerator import accelerator_of
from zmqtrain.train.device.base import Device
from zmqtrain.train.device.cpu import CpuDevice
from zmqtrain.train.device.streams import AcceleratorDevice


def device_of(context: RoleContext, *, local_rank: int, keep: bool = False) -> Device:
    """The device of a role that computes with torch. Raises `UsageError` if this host does not have it."""
    role = context.role
    if context.make_device is not None:
        return context.make_device(role)
    if role.device == "modelled":
        from zmqtrain.train.device.paced import PacedTorch

        return PacedTorch(context)
    return make_device(role.device, local_rank=local_rank, threads=role.threads, keep=keep)


def make_device(name: str, *, local_rank: int = 0, threads: int = 0, keep: bool = False) -> Device:
    """The device of this name (see `device_named`; not ``modelled``), with a compute thread of its own.

    ``keep``: on a CPU, the process keeps memory that it has freed (`zmqtrain.heap`).

    Raises `UsageError` if this host does not have the device.
    """
    device = device_named(name, local_rank)
    if device.type == "cpu":
        if keep:
            keep_memory()
        return CpuDevice(threads)
    accelerator = accelerator_of(device)
    assert accelerator is not None
    return AcceleratorDevice(accelerator, device)


def device_named(name: str, local_rank: int = 0) -> torch.device:
    """The torch device for ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (CUDA if there is any, with the workers of a host in turn).

    Raises `UsageError` if this host does not have the device.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = f"cuda:{local_rank % devices}" if devices else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise UsageError(f"there is no device {name!r}; choose cpu, cuda, cuda:N or auto")
    index = int(number) if number else local_rank % max(1, devices)
    if index >= devices:
        found = f"torch sees {devices} CUDA devices here" if devices else "torch sees no CUDA device here"
        raise UsageError(f'device {name}: {found}; set [compute] device to "cpu" or "auto", or correct [[hosts]] devices')
    return torch.device("cuda", index)
