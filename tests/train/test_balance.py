"""Who takes how many samples: decided alike everywhere, changed only where it is worth it, and right in the end."""

from __future__ import annotations

import random

import pytest

from tests.train.world import topology_of
from zmqtrain.topology.placement import place
from zmqtrain.train.balance import FIRST_STEPS, WORTH, decide, due
from zmqtrain.train.shares import Shares


def test_when_parts_are_decided() -> None:
    assert [steps for steps in range(131) if due(steps, 50)] == [4, 8, 16, 32, 50, 100]
    assert [steps for steps in range(9) if due(steps, 3)] == [3, 6]
    assert [steps for steps in range(9) if due(steps, 1)] == list(range(1, 9))
    assert FIRST_STEPS == 4


def test_parts_follow_throughput() -> None:
    decision = decide([30, 30], [0.01, 0.02])
    assert (decision.parts, decision.changed) == ((40, 20), True)
    assert decision.gain == pytest.approx(1.5)
    assert decision.reason == (
        "worker 1 takes 600 ms for its 30 samples, the fastest worker 300 ms; the new parts should make steps 1.50 times as fast"
    )


def test_what_brings_little_is_left() -> None:
    decision = decide([40, 20], [0.01, 0.0205])
    assert (decision.parts, decision.changed) == ((40, 20), False)
    assert decision.gain < WORTH
    assert "would make steps" in decision.reason
    assert not decide([5, 5], [1.0, 1.09]).changed, "whole samples cannot do better"


def test_nobody_is_starved_or_judged_unmeasured() -> None:
    assert decide([64, 64], [0.001, 10.0]).parts == (124, 4)
    assert decide([8, 8], [0.001, 10.0]).parts == (15, 1)
    assert decide([8, 8], [0.001, 10.0], least=4).parts == (12, 4)
    decision = decide([8, 8, 8], [0.1, 0.0, 0.2])
    assert (decision.parts, decision.changed) == ((8, 8, 8), False)
    assert "worker 1 has no measurement" in decision.reason


@pytest.mark.parametrize("fixed_s", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("speeds", [(1.0, 2.0), (1.0, 1.0, 4.0), (3.0, 2.0, 1.0, 0.5)])
def test_decisions_end_where_all_take_equally_long(speeds: tuple[float, ...], fixed_s: float) -> None:
    """Also where a part of the time does not depend on the samples; and there they stay."""
    parts = (100,) * len(speeds)
    for _ in range(12):
        seconds = [fixed_s + 0.01 * part / speed for part, speed in zip(parts, speeds, strict=True)]
        parts = decide(parts, [total / part for total, part in zip(seconds, parts, strict=True)]).parts
    seconds = [fixed_s + 0.01 * part / speed for part, speed in zip(parts, speeds, strict=True)]
    assert max(seconds) < (1.06 if fixed_s < 0.5 else 1.12) * min(seconds), "but for what is not worth it"
    assert not decide(parts, [total / part for total, part in zip(seconds, parts, strict=True)]).changed


def test_parts_settle_where_times_are_noisy() -> None:
    draw, parts, changes = random.Random(1), (64, 64), 0
    for _ in range(200):
        decision = decide(parts, [0.01 * draw.gauss(1, 0.01), 0.02 * draw.gauss(1, 0.01)])
        parts, changes = decision.parts, changes + decision.changed
    assert changes <= 2
    assert abs(parts[0] - 85) <= 2


def shares_of(worker: int, **sections: dict[str, object]) -> Shares:
    topology = topology_of(**sections)
    placement = place(topology)
    return Shares.of(topology, placement, placement.role(f"worker/{worker}"))


SYNC = {"kind": "model_server", "staleness": "sync"}
ASYNC = {"kind": "model_server", "staleness": "async"}


@pytest.mark.parametrize(
    ("parts", "exchange", "bounds"),
    [
        ("even", SYNC, [(0, 5), (5, 10), (10, 15), (15, 20)]),
        ("measured", SYNC, [(0, 5), (5, 10), (10, 15), (15, 20)]),
        ("measured", ASYNC, [(0, 5), (5, 10), (10, 15), (15, 20)]),
        ([4, 1], SYNC, [(0, 8), (8, 10), (10, 18), (18, 20)]),
        ([4, 1], ASYNC, [(0, 8), (8, 10), (10, 18), (18, 20)]),
        ([4, 4, 1, 1], SYNC, [(0, 8), (8, 16), (16, 18), (18, 20)]),  # groups in step divide the batches of all
        ([4, 1, 1, 1], ASYNC, [(0, 8), (8, 10), (10, 15), (15, 20)]),  # else each its own
    ],
)
def test_shares(parts: object, exchange: dict[str, object], bounds: list[tuple[int, int]]) -> None:
    compute = {"groups": 2, "group_size": 2, "batch_size": 10, "parts": parts}
    assert [shares_of(worker, compute=compute, exchange=exchange).bounds(3) for worker in range(4)] == bounds


def test_a_change_counts_from_its_step_on() -> None:
    shares = shares_of(1, compute={"group_size": 3, "batch_size": 9, "parts": "measured"})
    shares.change(7, (1, 6, 2))
    shares.change(11, (2, 2, 5))
    assert [shares.bounds(step) for step in (0, 6, 7, 10, 11, 99)] == [(3, 6), (3, 6), (1, 7), (1, 7), (2, 4), (2, 4)]
    assert shares.samples(7) == 6
    assert shares.at(11) == (2, 2, 5)
    with pytest.raises(AssertionError):
        shares.change(12, (1, 1, 1))
