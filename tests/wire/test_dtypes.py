"""Names and types agree with torch and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zmqtrain.wire.dtypes import DTYPES, dtype_named, dtype_of_numpy, dtype_of_torch, torch_dtype


@pytest.mark.parametrize("name", DTYPES)
def test_torch_agrees(name: str) -> None:
    assert torch_dtype(name).itemsize == DTYPES[name].itemsize
    assert dtype_of_torch(torch_dtype(name)) is DTYPES[name]
    assert torch_dtype(name).is_floating_point == (DTYPES[name].kind == "float")


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if not dtype.raw])
def test_numpy_agrees(name: str) -> None:
    assert dtype_of_numpy(np.dtype(name)) is DTYPES[name]
    assert torch.from_numpy(np.zeros(1, name)).dtype is torch_dtype(name)


def test_others_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'float31'.*float32"):
        dtype_named("float31")
    with pytest.raises(ValueError, match=">f4"):
        dtype_of_numpy(np.dtype(">f4"))
    with pytest.raises(ValueError, match=r"\|O"):
        dtype_of_numpy(np.dtype(object))
    with pytest.raises(ValueError, match="qint8"):
        dtype_of_torch(torch.qint8)
