"""Which algorithm a collective uses, by size and number of ranks.

The alpha-beta model: a message of n bytes takes alpha + n * beta, and adding or copying them takes n * gamma. For p ranks, with
r = 2^floor(log2 p)::

    all-reduce      ring      2 (p-1) alpha      + 2 (p-1)/p n beta
                    halving   2 log2 r alpha     + 2 (r-1)/r n beta     (+ 2 alpha + 2 n beta if p is not a power of two)
                    doubling    log2 r alpha     + log2 r n beta        (the same); adds and copies log2 r n, the others (p-1)/p n
    reduce-scatter  ring        (p-1) alpha      + (p-1)/p n beta
                    halving     log2 r alpha     + (r-1)/r n beta       (+ 2 alpha + (1 + 1/p) n beta if p is not a power of two)
    all-gather      ring        (p-1) alpha      + (p-1)/p n beta
                    bruck       ceil(log2 p) alpha + (p-1)/p n beta

By this model a ring never beats halving (powers of two) or Bruck. On a real network it does for large payloads: each rank has
one sender and one receiver, all links carry the same amount at any time, and the pieces stream through all hops, while the other
algorithms start an exchange with a new partner in each step. ``DISTANT`` is the factor on beta for algorithms that are not rings.
All ranks see the same sizes and constants, so all make the same choice; for that reason nothing is measured at run time.

Measured on one host of 2 processors (ms; `python -m benchmarks collectives` measures the choice)::

    all-reduce of            4 KB   100 KB   400 KB   4 MB   100 MB
    2 processes   doubling    0.2              0.7     6.4
                  ring        0.4              1.9     4.1      53
    4 processes   doubling    1.6      1.8     3.4    23.7
                  halving     2.3      2.3     4.3     9.7     209
                  ring        2.9      3.6     5.2    11.1     186
"""

from __future__ import annotations

from typing import Literal, TypeAlias

AllReduceAlgorithm: TypeAlias = Literal["ring", "halving", "doubling"]
ReduceScatterAlgorithm: TypeAlias = Literal["ring", "halving"]
AllGatherAlgorithm: TypeAlias = Literal["ring", "bruck"]

#: Seconds per message of any size: half a round trip of two Python processes over ZeroMQ on one host.
ALPHA_S = 150e-6
#: Seconds per byte: those of 1 Gbit/s, an ordinary link between hosts. Within a host, where a byte takes a tenth of that, this
#: costs four ranks up to a millisecond in an all-reduce of 60 to 300 KB; the other way round it cost a third of the time on slow
#: links.
BETA_S = 8e-9
#: Seconds to add or copy a byte in memory.
GAMMA_S = 0.2e-9
#: The factor on the time of a byte if the partner changes from step to step.
DISTANT = 1.05
#: Handing over a piece costs about ALPHA_S / 3, so smaller ones do not pay; several per part let adding overlap with receiving.
MIN_PIECE_BYTES = 256 * 1024


def choose_all_reduce(nbytes: int, size: int) -> AllReduceAlgorithm:
    """The fastest all-reduce of ``nbytes`` over ``size`` ranks."""
    steps, extra = _steps(size)
    share = (1 << steps) - 1
    folding = extra * (2 * ALPHA_S + 2 * nbytes * BETA_S)
    costs: dict[AllReduceAlgorithm, float] = {
        "ring": (size - 1) * (2 * ALPHA_S + nbytes / size * (2 * BETA_S + GAMMA_S)),
        "halving": 2 * steps * ALPHA_S + share / (share + 1) * nbytes * (2 * BETA_S * _distant(size) + GAMMA_S) + folding,
        "doubling": steps * (ALPHA_S + nbytes * (BETA_S * _distant(size) + 2 * GAMMA_S)) + folding,
    }
    return min(costs, key=lambda name: costs[name])


def choose_reduce_scatter(nbytes: int, size: int) -> ReduceScatterAlgorithm:
    """The fastest reduce-scatter of ``nbytes`` over ``size`` ranks."""
    steps, extra = _steps(size)
    share = (1 << steps) - 1
    ring = (size - 1) * (ALPHA_S + nbytes / size * BETA_S)
    folding = extra * (2 * ALPHA_S + (1 + 1 / size) * nbytes * BETA_S)
    halving = steps * ALPHA_S + share / (share + 1) * nbytes * BETA_S * _distant(size) + folding
    return "ring" if ring <= halving else "halving"


def choose_all_gather(nbytes: int, size: int) -> AllGatherAlgorithm:
    """The fastest all-gather over ``size`` ranks of ``nbytes`` in total."""
    ring = (size - 1) * (ALPHA_S + nbytes / size * BETA_S)
    bruck = (size - 1).bit_length() * ALPHA_S + (size - 1) / size * nbytes * BETA_S * _distant(size)
    return "ring" if ring <= bruck else "bruck"


def piece_bytes(part_bytes: int, chunk_bytes: int) -> int:
    """The size of the pieces of a part: at least four pieces if the part is large enough, and never more than the endpoint's
    chunk."""
    return min(chunk_bytes, max(MIN_PIECE_BYTES, part_bytes // 4))


def _steps(size: int) -> tuple[int, int]:
    """log2 of the largest power of two in ``size``, and 1 if ranks are left over."""
    steps = size.bit_length() - 1
    return steps, int(size != 1 << steps)


def _distant(size: int) -> float:
    return DISTANT if size > 2 else 1.0
