"""The soak's verdicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import (
    SHAPES,
    WARM_UP_S,
    WATCHED_S,
    WHOLE,
    Held,
    SoakError,
    Watch,
    _all_have_joined,
    bench_soak,
    judge,
    judge_held,
)
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


def watched(name: str, seconds: int, mb_at: Callable[[int], float], files_at: Callable[[int], int] = lambda second: 40) -> Watch:
    held = [Held(float(at), int(1e6 * mb_at(at)), files_at(at), threads=8) for at in range(0, seconds, 5)]
    return Watch(name, held)


def test_memory_is_judged_once_a_process_is_warm() -> None:
    """What grows for five minutes, and then stays, is no leak; what grows on, ever so slowly, is told."""
    warming = watched("worker/0", 1800, lambda second: 50 + min(second, 300) / 10)
    leaking = watched("worker/1", 1800, lambda second: 50 + second / 100)
    assert warming.growth() == pytest.approx(0.0, abs=1.0)
    assert leaking.growth() == pytest.approx(36.0, rel=1e-3)
    assert watched("worker/2", int(WARM_UP_S + WATCHED_S), lambda second: 50 + second).growth() is None
    judge_held("gossip", [warming, watched("worker/2", 60, lambda second: 50 + second)])
    with pytest.raises(SoakError, match=r"gossip: worker/1 has gained 10.\d MB in 17 min since it was warm"):
        judge_held("gossip", [warming, leaking])


def test_open_files_may_come_and_go_but_not_become_more() -> None:
    going = watched("worker/0", 1800, lambda second: 50, lambda second: 40 + 30 * (second % 60 < 10))
    leaking = watched("the launcher", 1800, lambda second: 50, lambda second: 40 + second // 30)
    judge_held("gossip", [going])
    with pytest.raises(SoakError, match=r"gossip: the launcher has .* more open files or threads than when it was warm"):
        judge_held("gossip", [going, leaking])


def test_faults_begin_once_all_have_joined(tmp_path: Path) -> None:
    """A run that loses a worker before that ends, as it should."""
    events = tmp_path / "events.jsonl"
    assert not _all_have_joined(events)
    events.write_text('{"kind":"join"}\n{"kind":"runn')
    assert not _all_have_joined(events)
    events.write_text('{"kind":"join"}\n{"kind":"running"}\n{"kin')
    assert _all_have_joined(events)


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(UsageError, match="soak has no part 'ring': allreduce"):
        list(bench_soak(parts=["ring"]))
