"""Tensors as the transports take them: flat, contiguous, in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zmqtrain.c10d.errors import UnsupportedError, WrongCallError


class Flat:
    """A tensor as flat, contiguous host memory; what is written there is copied back to the tensor at the end.

    Writing raises no version of the tensor (as with gloo, autograd does not see communication), and inference tensors, which only
    code under `torch.inference_mode` may change, are written like all others.
    """

    def __init__(self, tensor: Tensor, *, write: bool = True) -> None:
        """``write``: copy back. ``self.flat`` is the memory."""
        tensor = with_memory(tensor)
        self._write = write
        if _is_flat_memory(tensor):  # the usual case, in a third of the time
            self._target = self._whole = tensor.data
            self.flat = self._whole.view(-1)
            return
        self._target = _alias(tensor)
        here = self._target.cpu() if tensor.device.type != "cpu" else self._target
        self._whole = here.resolve_conj().resolve_neg().contiguous()
        # A single element is contiguous whatever its stride, and views of it as bytes need 1.
        self.flat = self._whole.view(-1) if self._whole.numel() != 1 else self._whole.as_strided((1,), (1,))

    def write_back(self) -> None:
        """Copy to the tensor what was written, where the memory is not its own."""
        if not self._write or self._whole is self._target:
            return
        # Of an expanded tensor, several elements are one in memory: they had one value, and have one again.
        once = tuple(slice(1) if stride == 0 else slice(None) for stride in self._target.stride())
        result = self._whole[once]
        if result.numel() != self._whole.numel() and not torch.equal(result.expand_as(self._whole), self._whole):
            raise WrongCallError("different values for elements that are one in memory: clone() the expanded tensor before")
        self._target[once].copy_(result)

    def __enter__(self) -> Tensor:
        return self.flat

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.write_back()


class Flats:
    """Several tensors as `Flat`."""

    def __init__(self, tensors: Sequence[Tensor], *, write: bool = True) -> None:
        self._flats = [Flat(tensor, write=write) for tensor in tensors]

    def __enter__(self) -> list[Tensor]:
        return [flat.__enter__() for flat in self._flats]

    def __exit__(self, *what: object) -> None:
        for flat in self._flats:
            flat.__exit__(*what)


def apart(reads: Sequence[Tensor], writes: Sequence[Tensor], own: tuple[int, int]) -> list[Tensor]:
    """``reads``, of which those are copied that lie where an operation writes: it might write there before it has read all of them.

    ``own``: the places, in both, of what this rank passes to itself. That may be the same memory, as in a gather in place.
    """
    spans = [_span(each) for each in writes]
    lowest, highest = min((start for start, _ in spans), default=0), max((stop for _, stop in spans), default=0)

    def overlaps(place: int, read: Tensor) -> bool:
        start, stop = _span(read)
        if stop <= lowest or highest <= start:
            return False
        return any(
            start < other_stop and other_start < stop and ((place, other) != own or (start, stop) != (other_start, other_stop))
            for other, (other_start, other_stop) in enumerate(spans)
        )

    return [read.clone() if overlaps(place, read) else read for place, read in enumerate(reads)]


def _span(flat: Tensor) -> tuple[int, int]:
    start = flat.data_ptr()
    return start, start + flat.numel() * flat.element_size()


def with_memory(tensor: Tensor) -> Tensor:
    """The tensor itself, or what a pending result of torch's functional collectives becomes, once it has come.

    Raises `UnsupportedError` if there is no memory with its values: torch would end the process where these are read.
    """
    if tensor.data_ptr() or not tensor.numel():
        return tensor
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        come: Tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
        return come
    kind = "tensor" if type(tensor) is Tensor else type(tensor).__name__
    raise UnsupportedError(
        f"a {kind} on {tensor.device} that has no memory of its own: pass the tensor with its values, as to_local() of a DTensor"
    )


def _is_flat_memory(tensor: Tensor) -> bool:
    """Whether ``data`` is an alias as `_alias` makes it, and contiguous."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.numel() != 1
        and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, as a tensor without history, with a version of its own."""
    if tensor.is_conj() or tensor.is_neg():  # the memory holds other values
        return tensor.detach()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
