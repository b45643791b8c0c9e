"""A tensor that can be sent: one range of memory, seen by torch and numpy alike.

torch is imported only where a method needs it, so processes that merely pass tensors on never load it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from zmqtrain.errors import WireError
from zmqtrain.wire.dtypes import DType, dtype_named, dtype_of_numpy, dtype_of_torch, torch_dtype
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    import torch

    Array = npt.NDArray[Any]

#: Anything that exposes its memory: bytes, bytearray, memoryview, mmap, a transport's frame buffer.
Buffer = bytes | bytearray | memoryview


class TensorPayload:
    """Elements in memory. Aliases the memory from which it was made and keeps it alive; never copies it.

    Make one with `of` (from a tensor or an array) or `received` (from bytes that came over the network). In-place methods need
    writable memory (`ValueError` otherwise) and an operand with the same ``numel``; an operand of another float type is converted.
    Payloads of CUDA tensors can compute, but have no `frames`: copy them to (pinned) host memory first.
    """

    __slots__ = ("_array", "_info", "_tensor", "dtype", "meta", "nbytes", "numel", "shape")

    meta: Value
    dtype: Final[str]
    numel: Final[int]
    nbytes: Final[int]
    shape: Final[tuple[int, ...]]

    def __init__(self, info: DType, shape: tuple[int, ...], array: Array | None, tensor: torch.Tensor | None, meta: Value) -> None:
        """Not to be called from outside. ``array`` and ``tensor`` are flat; one may be missing (no array: not in host memory)."""
        self._info = info
        self._array = array
        self._tensor = tensor
        self.dtype = info.name
        self.shape = shape
        self.numel = math.prod(shape)
        self.nbytes = self.numel * info.itemsize
        self.meta = meta

    @classmethod
    def of(cls, source: torch.Tensor | Array, meta: Value = None) -> TensorPayload:
        """The memory of a torch tensor (on any device) or numpy array, not copied.

        Raises `ValueError` if it is not contiguous, or its element type cannot be sent.
        """
        if isinstance(source, np.ndarray):
            info = dtype_of_numpy(source.dtype)
            if not source.flags.c_contiguous:
                raise ValueError(f"the array of shape {source.shape} is not contiguous, so its memory cannot be sent directly")
            return cls(info, source.shape, source.reshape(-1), None, meta)
        info = dtype_of_torch(source.dtype)
        if not source.is_contiguous():
            raise ValueError(
                f"the tensor of shape {tuple(source.shape)} is not contiguous, so its memory cannot be sent directly: "
                "call .contiguous() first, if a copy is acceptable"
            )
        if source.is_conj() or source.is_neg():
            raise ValueError("the tensor is a lazy conjugate or negative, so its memory holds other values: resolve it first")
        flat = source.detach().view(-1)
        return cls(info, tuple(source.shape), _array_of(flat, info), flat, meta)

    @classmethod
    def received(cls, buffer: Buffer, dtype: str, shape: Sequence[int], meta: Value = None) -> TensorPayload:
        """The elements in ``buffer``, not copied (except small buffers that are not aligned).

        Raises `WireError` if the sizes do not fit or the type is unknown. Over read-only memory the payload is read-only.
        """
        try:
            info = dtype_named(dtype)
        except ValueError as error:
            raise WireError(str(error)) from None
        shape = tuple(shape)
        view = memoryview(buffer)
        nbytes = math.prod(shape) * info.itemsize
        if view.nbytes != nbytes or min(shape, default=0) < 0:
            raise WireError(f"{view.nbytes:,} bytes were received for {dtype}{list(shape)}, which needs {nbytes:,}")
        if not nbytes:
            return cls(info, shape, np.empty(0, info.storage), None, meta)
        array = np.frombuffer(view, info.storage)
        if not array.flags.aligned or (info.raw and array.__array_interface__["data"][0] % info.itemsize):
            array = array.copy()  # ZeroMQ places small messages at any address; from 8 KiB on they are aligned
        return cls(info, shape, array, None, meta)

    @classmethod
    def empty(cls, numel: int, dtype: str, meta: Value = None) -> TensorPayload:
        """``numel`` elements in new host memory, with undefined content."""
        info = dtype_named(dtype)
        return cls(info, (numel,), np.empty(numel * info.itemsize if info.raw else numel, info.storage), None, meta)

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a torch tensor of `shape`. Never write to it if `writable` is false."""
        flat = self._flat()
        return flat if len(self.shape) == 1 else flat.view(self.shape)

    def numpy(self) -> Array:
        """The memory as a numpy array of `shape`. Raises `TypeError` for types that numpy lacks, and for memory of a device."""
        if self._info.raw:
            raise TypeError(f"numpy has no {self.dtype}: use .tensor, or .frames() for the bytes")
        return self._host().reshape(self.shape)

    @property
    def writable(self) -> bool:
        """Whether the in-place methods may be used."""
        return self._array is None or bool(self._array.flags.writeable)

    @property
    def _exact(self) -> bool:
        """Whether the elements are integers or booleans, for which only numpy has all the arithmetic."""
        return self._info.kind in ("int", "bool")

    @property
    def pointer(self) -> int:
        """The address of the first element."""
        if self._array is None:
            return self._flat().data_ptr()
        address = self._array.__array_interface__["data"][0]
        assert isinstance(address, int)
        return address

    def part(self, start: int, stop: int) -> TensorPayload:
        """Elements ``start`` up to ``stop`` as a flat view. It does not inherit `meta`."""
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"{start}:{stop} is not a part of {self.numel} elements")
        info = self._info
        if self._array is None:
            return TensorPayload(info, (stop - start,), None, self._flat()[start:stop], None)
        scale = info.itemsize if info.raw else 1
        return TensorPayload(info, (stop - start,), self._array[start * scale : stop * scale], None, None)

    def with_meta(self, meta: Value) -> TensorPayload:
        """The same memory with another ``meta``."""
        return TensorPayload(self._info, self.shape, self._array, self._tensor, meta)

    def mapped(self, dtype: str, numel: int, function: Callable[[torch.Tensor], torch.Tensor], meta: Value) -> TensorPayload:
        result = TensorPayload.of(function(self.tensor.view(-1)), meta)
        assert (result.dtype, result.numel) == (dtype, numel), "the function gives what was announced"
        return result

    def empty_like(self) -> TensorPayload:
        if self._array is None:
            return TensorPayload.of(self._flat().new_empty(self.shape))
        return TensorPayload(self._info, self.shape, np.empty_like(self._array), None, None)

    def copy_(self, other: Payload) -> None:
        source = self._operand(other)
        if self.dtype == source.dtype and self._array is not None and source._array is not None:
            np.copyto(self._array, source._array)
        else:
            self._target().copy_(source._flat())

    def add_(self, other: Payload) -> None:
        source = self._operand(other)
        mine, theirs = self._array, source._array
        if (
            mine is not None
            and theirs is not None
            and (self._exact or (self.dtype == source.dtype and self._info.numpy_arithmetic))
        ):
            _add(mine, theirs)
            return
        target, addend = self._target(), source._flat()
        if source._info.itemsize == 1 and source._info.raw:  # torch cannot add 8-bit floats
            addend = addend.float()
        if self._info.itemsize == 1:
            target.copy_(target.float().add_(addend))
        else:
            target.add_(addend)

    def scale_(self, factor: float) -> None:
        if self._exact:
            if factor != 1:
                if self._info.kind == "bool" or factor != round(factor):
                    raise TypeError(f"{self.dtype} elements cannot be multiplied by {factor}")
                _scale(self._host(), round(factor))
        elif self._info.numpy_arithmetic and self._array is not None:
            _scale(self._array, factor)
        elif self._info.itemsize == 1:
            target = self._target()
            target.copy_(target.float().mul_(factor))
        else:
            self._target().mul_(factor)

    def average_(self, other: Payload) -> None:
        # Add first, instead of `lerp`: both sides of an exchange then get the same bits.
        self.add_(other)
        self.scale_(0.5)

    def frames(self) -> Sequence[memoryview]:
        """One view of the bytes (format ``B``); none if there are no elements. The view is writable if the memory is."""
        if not self.nbytes:
            return ()
        return (self._host().data.cast("B"),)

    def _operand(self, other: Payload) -> TensorPayload:
        """``other``, checked to fit."""
        if not isinstance(other, TensorPayload):
            raise TypeError(f"{other!r} has no elements in memory, so it cannot be combined with a tensor")
        if other.numel != self.numel:
            raise ValueError(f"{other!r} does not fit {self!r}: the numbers of elements differ")
        if _RANK[other._info.kind] > _RANK[self._info.kind]:
            raise TypeError(f"{other.dtype} elements cannot be converted to {self.dtype}")
        return other

    def _host(self) -> Array:
        if self._array is None:
            raise ValueError(f"{self!r} is in the memory of {self._flat().device}: copy it to host memory before sending it")
        return self._array

    def _flat(self) -> torch.Tensor:
        if self._tensor is None:
            assert self._array is not None
            self._tensor = _tensor_of(self._array, self._info)
        return self._tensor

    def _target(self) -> torch.Tensor:
        """The flat tensor, to be written to. (torch does not know read-only memory and would write to it.)"""
        if not self.writable:
            raise ValueError(f"{self!r} is in read-only memory")
        return self._flat()

    def __repr__(self) -> str:
        meta = "" if self.meta is None else f", meta={self.meta!r:.60}"
        return f"TensorPayload({self.dtype}{list(self.shape)}{meta})"


# numpy would warn about overflow and infinity minus infinity. Gradients may have those; they show in the loss.
# (A decorator, since the context manager takes longer than adding 256 numbers. torch's own loops are no faster, and would start
# threads of their own from the event loop's thread.)
@np.errstate(all="ignore")
def _add(target: Array, addend: Array) -> None:
    np.add(target, addend, out=target)


@np.errstate(all="ignore")
def _scale(target: Array, factor: float) -> None:
    np.multiply(target, target.dtype.type(factor), out=target)


#: The ranks of kinds of types: one of a higher rank cannot be converted to a lower one without losing something.
_RANK: Final = {"bool": 0, "int": 1, "float": 2, "complex": 3}


def _array_of(flat: torch.Tensor, info: DType) -> Array | None:
    """The memory of a flat tensor as an array; None if it is not in host memory."""
    if flat.device.type != "cpu":
        return None
    if info.raw:
        import torch

        flat = flat.view(torch.uint8)
    array: Array = flat.numpy()
    return array


class _Writable:
    """Presents an array's memory to numpy as writable."""

    __slots__ = ("__array_interface__", "keep")

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = interface = array.__array_interface__
        interface["data"] = (interface["data"][0], False)
        self.keep = array


def _tensor_of(array: Array, info: DType) -> torch.Tensor:
    import torch

    if not array.size:
        return torch.empty(0, dtype=torch_dtype(info.name))
    if not array.flags.writeable:
        # torch warns about read-only memory and cannot represent it; `TensorPayload._target` checks it instead.
        array = np.asarray(_Writable(array))
    tensor = torch.from_numpy(array)
    return tensor.view(torch_dtype(info.name)) if info.raw else tensor
