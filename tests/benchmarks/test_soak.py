"""The soak's verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak import SHAPES, WATCHED_S, WHOLE, SoakError, Watch, bench_soak, judge
from zmqtrain.errors import UsageError


def summary(**account: int) -> dict[str, Any]:
    return {"status": "done", "steps": 7, "account": {"due": 10, "counted": 10, "repeated": 0, "lost": 0, **account}}


def test_runs_that_have_trained_every_sample_once_pass() -> None:
    for name in SHAPES:
        judge(name, summary(), "")
    judge("replicas-sync", {"status": "done", "steps": 7}, "")  # there is no account
    judge("gossip", summary(counted=8, lost=2), "")


@pytest.mark.parametrize("account", [{"counted": 11, "repeated": 1}, {"counted": 8}, {"counted": 8, "lost": 2}])
def test_servers_must_have_trained_every_sample_once(account: dict[str, int]) -> None:
    for name in WHOLE:
        with pytest.raises(SoakError, match=f"{name}: the account is"):
            judge(name, summary(**account), "")


def test_a_run_that_failed_is_told_with_its_last_words() -> None:
    with pytest.raises(SoakError, match="gossip: failed after 7 steps:\nno more workers"):
        judge("gossip", {"status": "failed", "steps": 7}, "no more workers")


def test_growth_of_memory_is_judged_after_a_while() -> None:
    steady, growing = Watch("worker/0"), Watch("worker/1")
    for second in range(100):
        steady.memory.append((float(second), 50_000_000 + 10_000_000 * (second == 0)))
        growing.memory.append((float(second), 50_000_000 + 10_000 * second))
        assert (steady.growth() is None) == (second < WATCHED_S)
    assert steady.growth() == pytest.approx(0.0)
    assert growing.growth() == pytest.approx(36.0)  # 10 kB a second


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(UsageError, match="soak has no part 'ring': allreduce"):
        list(bench_soak(parts=["ring"]))
