"""Tensors that can be told apart."""

from __future__ import annotations

import numpy as np

from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload


def tensor(value: float, numel: int = 10) -> TensorPayload:
    return TensorPayload.of(np.full(numel, value, np.float32))


def content(payload: Payload) -> float:
    assert isinstance(payload, TensorPayload)
    array = payload.numpy()
    assert (array == array[0]).all()
    return float(array[0])
