"""What the benchmark of the simulated world exchanges takes the time that the links need."""

from __future__ import annotations

import pytest

from benchmarks.simulate import BITS_PER_S, LATENCY_S, neighbour_exchange


@pytest.mark.parametrize("workers", [7, 64])
def test_neighbours_exchange_at_the_links_speed(workers: int) -> None:
    """Every card sends and receives at once, and nobody shares: a step takes its bytes, and a latency."""
    seconds = neighbour_exchange(workers, steps=5, buckets=4, numel=250_000)
    assert seconds == pytest.approx(5 * (4 * 8e6 / BITS_PER_S + LATENCY_S), rel=0.03)
