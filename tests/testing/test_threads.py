"""Ranks that are threads of one process wait for each other."""

from __future__ import annotations

import threading

import pytest
import torch

from zmqtrain.errors import PeerTimeoutError
from zmqtrain.parallel.communicator import Expected, Fabric, Label
from zmqtrain.testing.threads import run_ranks


def test_a_rank_waits_as_long_as_it_is_told() -> None:
    ended = threading.Event()

    def on_rank(fabric: Fabric) -> None:
        if fabric.rank:
            ended.wait()
            return
        try:
            fabric.among((0, 1)).exchange([], [Expected(1, (2,), torch.float32)], Label("", "statistics")).wait()
        finally:
            ended.set()

    with pytest.raises(PeerTimeoutError, match=r"rank 1 did not answer within 0\.01 s"):
        run_ranks(2, on_rank, timeout_s=0.01)


def test_without_a_limit_the_error_of_another_rank_ends_a_wait() -> None:
    def on_rank(fabric: Fabric) -> None:
        if fabric.rank:
            raise ValueError("mine")
        fabric.among((0, 1)).exchange([], [Expected(1, (2,), torch.float32)], Label("", "statistics")).wait()

    with pytest.raises(ValueError, match="mine"):
        run_ranks(2, on_rank, timeout_s=None)
