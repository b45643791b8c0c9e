"""A tensor that travels: one run of memory, seen by torch and numpy alike.

torch is imported only where a method needs it, so processes that merely pass tensors on never load it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """Elements in memory. Aliases the memory that it was made of; keeps it alive; never copies it.

    Make one by `of` (a tensor or an array) or by `received` (bytes that came over the network). In-place methods need writable
    memory (`ValueError` otherwise) and the other's ``numel`` equal to their own; another float type of the other is converted.
    Payloads of CUDA tensors compute, but have no `frames`: copy them to (pinned) host memory first.
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
        """The memory of a torch tensor (any device) or numpy array, without a copy.

        Raises `ValueError` where it is not contiguous, or its element type does not travel.
        """
        if isinstance(source, np.ndarray):
            info = dtype_of_numpy(source.dtype)
            if not source.flags.c_contiguous:
                raise ValueError(f"the array of shape {source.shape} is not contiguous, so its memory cannot be sent as it lies")
            return cls(info, source.shape, source.reshape(-1), None, meta)
        info = dtype_of_torch(source.dtype)
        if not source.is_contiguous():
            raise ValueError(
                f"the tensor of shape {tuple(source.shape)} is not contiguous, so its memory cannot be sent as it lies: "
                "call .contiguous() first, where a copy will do"
            )
        if source.is_conj() or source.is_neg():
            raise ValueError("the tensor is a lazy conjugate or negative, so its memory holds other values: resolve it first")
        flat = source.detach().view(-1)
        return cls(info, tuple(source.shape), _array_of(flat, info), flat, meta)

    @classmethod
    def received(cls, buffer: Buffer, dtype: str, shape: Sequence[int], meta: Value = None) -> TensorPayload:
        """The elements that lie in ``buffer``, without a copy (but for small buffers that lie askew in memory).

        Raises `WireError` where the sizes do not fit or the type is unknown. Over read-only memory the payload is read-only.
        """
        try:
            info = dtype_named(dtype)
        except ValueError as error:
            raise WireError(str(error)) from None
        shape = tuple(shape)
        view = memoryview(buffer)
        nbytes = math.prod(shape) * info.itemsize
        if view.nbytes != nbytes or min(shape, default=0) < 0:
            raise WireError(f"{view.nbytes} bytes were received for {dtype}{list(shape)}, which takes {nbytes}")
        if not nbytes:
            return cls(info, shape, np.empty(0, info.storage), None, meta)
        array = np.frombuffer(view, info.storage)
        if not array.flags.aligned or (info.raw and array.__array_interface__["data"][0] % info.itemsize):
            array = array.copy()  # ZeroMQ packs small messages at any address; from 8 KiB on they are aligned
        return cls(info, shape, array, None, meta)

    @classmethod
    def empty(cls, numel: int, dtype: str, meta: Value = None) -> TensorPayload:
        """``numel`` elements in fresh host memory, with undefined content."""
        info = dtype_named(dtype)
        return cls(info, (numel,), np.empty(numel * info.itemsize if info.raw else numel, info.storage), None, meta)

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a torch tensor of `shape`. Never write to it where `writable` is false."""
        flat = self._flat()
        return flat if len(self.shape) == 1 else flat.view(self.shape)

    def numpy(self) -> Array:
        """The memory as a numpy array of `shape`. Raises `TypeError` for types that numpy has not, and off the host."""
        if self._info.raw:
            raise TypeError(f"numpy has no {self.dtype}: use .tensor, or .frames() for the bytes")
        return self._host().reshape(self.shape)

    @property
    def writable(self) -> bool:
        """Whether the in-place methods may be used."""
        return self._array is None or bool(self._array.flags.writeable)

    @property
    def _exact(self) -> bool:
        """Whether the elements are integers or truth values, for which only numpy has all the arithmetic."""
        return self._info.kind in ("int", "bool")

    @property
    def pointer(self) -> int:
        """Address of the first element."""
        if self._array is None:
            return self._flat().data_ptr()
        address = self._array.__array_interface__["data"][0]
        assert isinstance(address, int)
        return address

    def part(self, start: int, stop: int) -> TensorPayload:
        """Elements ``start`` to ``stop`` as a flat view. It does not inherit `meta`."""
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"a part {start}:{stop} of {self.numel} elements")
        info = self._info
        if self._array is None:
            return TensorPayload(info, (stop - start,), None, self._flat()[start:stop], None)
        scale = info.itemsize if info.raw else 1
        return TensorPayload(info, (stop - start,), self._array[start * scale : stop * scale], None, None)

    def with_meta(self, meta: Value) -> TensorPayload:
        """The same memory with another ``meta``."""
        return TensorPayload(self._info, self.shape, self._array, self._tensor, meta)

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
        if source._info.itemsize == 1 and source._info.raw:  # torch adds no 8-bit floats
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
        # Adding first, not `lerp`: both sides of an exchange then get the same bits, whoever calls it.
        self.add_(other)
        self.scale_(0.5)

    def frames(self) -> Sequence[memoryview]:
        """One view of the bytes (format ``B``), none if there are no elements. The view is writable where the memory is."""
        if not self.nbytes:
            return ()
        return (self._host().data.cast("B"),)

    def _operand(self, other: Payload) -> TensorPayload:
        """``other``, checked to fit."""
        if not isinstance(other, TensorPayload):
            raise TypeError(f"a tensor cannot take up {other!r}, which has no elements in memory")
        if other.numel != self.numel:
            raise ValueError(f"{other!r} does not fit {self!r}: the numbers of elements differ")
        if _RANK[other._info.kind] > _RANK[self._info.kind]:
            raise TypeError(f"{other.dtype} elements cannot go into {self.dtype}")
        return other

    def _host(self) -> Array:
        if self._array is None:
            raise ValueError(f"{self!r} lies in the memory of {self._flat().device}: copy it to host memory before sending it")
        return self._array

    def _flat(self) -> torch.Tensor:
        if self._tensor is None:
            assert self._array is not None
            self._tensor = _tensor_of(self._array, self._info)
        return self._tensor

    def _target(self) -> torch.Tensor:
        """The flat tensor, to be written to. (torch knows no read-only memory and would write to it.)"""
        if not self.writable:
            raise ValueError(f"{self!r} lies in read-only memory")
        return self._flat()

    def __repr__(self) -> str:
        meta = "" if self.meta is None else f", meta={self.meta!r:.60}"
        return f"TensorPayload({self.dtype}{list(self.shape)}{meta})"


# numpy would warn of overflow and of infinity minus infinity. Gradients may do that; who looks for it looks at the loss.
# (A decorator, since the context manager takes longer than adding up 256 numbers. torch's own loops are no faster, and would start
# threads of their own for the event loop's thread.)
@np.errstate(all="ignore")
def _add(target: Array, addend: Array) -> None:
    np.add(target, addend, out=target)


@np.errstate(all="ignore")
def _scale(target: Array, factor: float) -> None:
    np.multiply(target, target.dtype.type(factor), out=target)


#: A type of a higher rank does not go into one of a lower rank: something would be lost without a word.
_RANK: Final = {"bool": 0, "int": 1, "float": 2, "complex": 3}


def _array_of(flat: torch.Tensor, info: DType) -> Array | None:
    """The memory of a flat tensor as an array; None where it does not lie in host memory."""
    if flat.device.type != "cpu":
        return None
    if info.raw:
        import torch

        flat = flat.view(torch.uint8)
    array: Array = flat.numpy()
    return array


class _Writable:
    """Shows an array's memory to numpy as writable."""

    __slots__ = ("__array_interface__", "keep")

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}
        self.keep = array


def _tensor_of(array: Array, info: DType) -> torch.Tensor:
    import torch

    if not array.size:
        return torch.empty(0, dtype=torch_dtype(info.name))
    if not array.flags.writeable:
        # torch warns about read-only memory and cannot express it; `TensorPayload._target` guards it instead.
        array = np.asarray(_Writable(array))
    tensor = torch.from_numpy(array)
    return tensor.view(torch_dtype(info.name)) if info.raw else tensor
