"""Tensors kept in a file until they are sent, one after another, so that they are never in memory together."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from zmqtrain.errors import CheckpointError


class Spool(Mapping[str, Tensor]):
    """Tensors by name, each read anew, in host memory, when it is asked for. Their file ends with this object."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes the tensors one by one. Raises `CheckpointError` if there is no room for them."""
        self._places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._file = tempfile.TemporaryFile(prefix="zmqtrain-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        offset = 0
        for name, tensor in tensors:
            content = tensor.detach().cpu().contiguous()
            self._places[name] = (offset, content.dtype, tuple(content.shape))
            offset += content.nbytes
            try:
                self._file.write(content.view(-1).view(torch.uint8).numpy().data)
                self._file.flush()
            except OSError as error:
                folder = tempfile.gettempdir()
                raise CheckpointError(
                    f"the gathered model cannot be written to a file in {folder}, where it is kept until it is sent: {error}; set "
                    "TMPDIR to a folder with room for it"
                ) from error

    def __getitem__(self, name: str) -> Tensor:
        offset, dtype, shape = self._places[name]
        found = torch.empty(shape, dtype=dtype)
        memory = found.view(-1).view(torch.uint8).numpy().data
        read = 0
        while read < len(memory):
            count = os.preadv(self._file.fileno(), [memory[read:]], offset + read)
            if not count:
                raise CheckpointError("the file with the gathered model was cut short")
            read += count
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
