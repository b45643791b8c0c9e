"""Tensors as payloads, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from zmqtrain.wire.tensor import TensorPayload


class Payloads(Mapping[str, TensorPayload]):
    """The payloads of named tensors, in host memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> TensorPayload:
        return TensorPayload.of(self._tensors[name].detach().cpu().contiguous())

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
