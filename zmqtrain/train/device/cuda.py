"""CUDA, as `zmqtrain.train.device.accelerator.Accelerator`: nothing but torch's own calls."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from zmqtrain.errors import HostMemoryError
from zmqtrain.parallel.turns import generator_state
from zmqtrain.topology.rounded import rounded_amount
from zmqtrain.train.device.accelerator import Event, Stream

#: ``cudaHostRegisterPortable``: pinned for every context of the process.
_PORTABLE = 1


class Cuda:
    """All CUDA devices that torch sees, as ``CUDA_VISIBLE_DEVICES`` limits them."""

    def count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def use(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def stream(self, device: torch.device) -> Stream:
        return cast(Stream, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def current(self, device: torch.device) -> Stream:
        return cast(Stream, torch.cuda.current_stream(device))

    def event(self) -> Event:
        return cast(Event, torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]  # otherwise waiting occupies a processor

    def copy(self, source: Tensor, target: Tensor, stream: Stream) -> None:
        with torch.cuda.stream(cast(torch.cuda.Stream, stream)):
            target.copy_(source, non_blocking=True)

    def move(self, source: Tensor, device: torch.device, stream: Stream) -> Tensor:
        with torch.cuda.stream(cast(torch.cuda.Stream, stream)):
            return source.to(device, non_blocking=True)  # torch keeps a pinned source until it has been copied

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(cast(torch.cuda.Stream, stream))

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def pin(self, tensor: Tensor, device: torch.device) -> bool:
        if tensor.is_pinned():
            return False
        with torch.cuda.device(device):
            error = _runtime().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, _PORTABLE)
        if int(error):
            said = _runtime().cudaGetErrorString(error)
            raise HostMemoryError(
                f"CUDA cannot pin {rounded_amount(tensor.nbytes)} of host memory ({said}); raise the limit on locked "
                "memory (ulimit -l)"
            )
        return True

    def unpin(self, tensor: Tensor) -> None:
        _runtime().cudaHostUnregister(tensor.data_ptr())

    def random_state(self, device: torch.device) -> Tensor:
        return generator_state(device)

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
