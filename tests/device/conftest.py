"""What needs a device whose memory is not the CPU's: on CUDA where there is any, else on the stand-in, in a process of its own.

``ZMQTRAIN_TEST_DEVICE=apart`` chooses the stand-in (`tests/test_apart.py` does).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

KIND = os.environ.get("ZMQTRAIN_TEST_DEVICE", "cuda")
if KIND == "apart":
    from tests.device import apart

    apart.load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:  # ten thousand, of all tests: as texts in a tenth of the time of paths
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            if item.get_closest_marker("processes") and KIND == "apart":
                item.add_marker(pytest.mark.skip(reason="processes of their own do not know the stand-in"))
            if not item.get_closest_marker("processes") and KIND == "cpu":
                item.add_marker(pytest.mark.skip(reason="the CPU's memory is not apart"))


@pytest.fixture
def kind() -> str:
    """Torch's name for the type of device."""
    return KIND


@pytest.fixture
def device() -> torch.device:
    """The first of them."""
    return torch.device(KIND, 0)
