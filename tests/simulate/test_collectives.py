"""Collectives on the simulated network, against what the alpha-beta model says of them."""

from __future__ import annotations

import asyncio
import random

import pytest

from zmqtrain.collectives.choose import AllReduceAlgorithm
from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.net.settings import NetSettings
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.topology.links import NetworkModel, Way
from zmqtrain.wire.phantom import PhantomPayload

ALPHA_S = 200e-6
BITS_PER_S = 1e9
#: One message a hop: the formula knows nothing of pieces that stream through all hops (which make the real thing a little faster).
WHOLE = NetSettings(chunk_bytes=1 << 30, window_bytes=1 << 40, inflight_bytes=1 << 40, outbox_bytes=1 << 40)


def measured(ranks: int, nbytes: int, algorithm: AllReduceAlgorithm, settings: NetSettings | None = None) -> float:
    """Virtual seconds of one all-reduce, after one to get to know each other."""

    async def main() -> float:
        network = SimulatedNetwork(NetworkModel(bandwidth=BITS_PER_S, way=Way(ALPHA_S)), random.Random(1))
        names = tuple(f"worker/{rank}" for rank in range(ranks))
        nodes = [network.endpoint(name, f"h{rank}", settings) for rank, name in enumerate(names)]
        groups = [Group(node, names, rank, "all") for rank, node in enumerate(nodes)]
        seconds = []
        for turn in range(2):
            start = asyncio.get_running_loop().time()
            payloads = [PhantomPayload(nbytes // 4) for _ in groups]
            calls = (all_reduce(g, p, ("sum", turn), algorithm=algorithm) for g, p in zip(groups, payloads, strict=True))
            await asyncio.gather(*calls)
            seconds.append(asyncio.get_running_loop().time() - start)
        await asyncio.gather(*(node.close() for node in nodes))
        return seconds[1]

    return run_virtual(main())


def ring(ranks: int, nbytes: int) -> float:
    """2(p - 1) alpha + 2(p - 1)/p n beta."""
    return 2 * (ranks - 1) * ALPHA_S + 2 * (ranks - 1) / ranks * nbytes * 8 / BITS_PER_S


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 32])
def test_a_ring_all_reduce_takes_what_the_formula_says(ranks: int) -> None:
    """100 MB; within 2 %: the rest is headers, and pieces that travel on before a whole part is there."""
    assert measured(ranks, 100_000_000, "ring") == pytest.approx(ring(ranks, 100_000_000), rel=0.02)


@pytest.mark.parametrize(("ranks", "nbytes"), [(2, 64_000), (8, 64_000), (64, 64_000), (4, 1_000_000), (32, 1_000_000)])
def test_also_where_latency_counts(ranks: int, nbytes: int) -> None:
    """Whole parts, as the formula has them. Small parts are of one packet, whose place between others' is not shared: up to 5 %."""
    assert measured(ranks, nbytes, "ring", WHOLE) == pytest.approx(ring(ranks, nbytes), rel=0.05)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_halving_takes_fewer_latencies_but_shares_its_nic_between_rounds(ranks: int) -> None:
    """2 log2(p) alpha + 2(p - 1)/p n beta, and up to a quarter more: pieces of a round are already on their way while the last ones
    of the round before share the NIC with them, so these come late, and what waits for them leaves the NIC idle at the end."""
    rounds = ranks.bit_length() - 1
    expected = 2 * rounds * ALPHA_S + 2 * (ranks - 1) / ranks * 8_000_000 * 8 / BITS_PER_S
    assert 0.99 * expected <= measured(ranks, 8_000_000, "halving", WHOLE) <= 1.25 * expected


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_doubling_takes_the_fewest(ranks: int) -> None:
    """log2(p) (alpha + n beta)."""
    rounds = ranks.bit_length() - 1
    expected = rounds * (ALPHA_S + 4_000 * 8 / BITS_PER_S)
    assert measured(ranks, 4_000, "doubling", WHOLE) == pytest.approx(expected, rel=0.05)
