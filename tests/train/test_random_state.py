"""Random states of a worker, beside other workers of the same process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from zmqtrain.data.draws import drawn_from
from zmqtrain.train.random_state import random_state, restore_random_state, seed_everything


@pytest.mark.parametrize("what", ["begins", "resumes"])
def test_samples_that_a_thread_reads_stay_those_of_their_seed(what: str) -> None:
    """Two workers in a process: one began while the other one's thread read samples, which were then others."""
    cpu = torch.device("cpu")
    kept = random_state(cpu)

    def changes() -> None:
        if what == "begins":
            seed_everything(7)
        else:
            restore_random_state(cpu, *kept)

    def drawn(between: Callable[[], None]) -> list[float]:
        with drawn_from([1]):
            first = random.random(), float(np.random.rand())
            between()
            return [*first, random.random(), float(np.random.rand())]

    other = threading.Thread(target=changes)

    def begins() -> None:
        other.start()
        other.join(0.05)  # by then it would have changed the generators if it did not wait

    before = random.getstate(), np.random.get_state()
    try:
        expected = drawn(lambda: None)
        assert drawn(begins) == expected
    finally:
        other.join()
        random.setstate(before[0])
        np.random.set_state(before[1])
