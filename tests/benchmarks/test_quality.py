"""When the systems that are compared have reached a loss."""

from __future__ import annotations

import json
import runpy
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import quality
from benchmarks.quality import OURS, PARTS, PEERS, REFERENCE, Run, Runs, bench_quality, combined, reached, rows
from benchmarks.quality_peer import SYSTEMS
from benchmarks.quality_task import Problem
from zmqtrain.errors import UsageError, ZmqTrainError

DOCS = Path(__file__).parents[2] / "docs"


def test_an_evaluation_ends_with_its_last_rank_and_counts_samples() -> None:
    logs = [["1.0 8.0 4", "2.0 4.0 4"], ["1.5 10.0 2"]]  # the second rank has not evaluated twice
    assert combined(logs) == [(1.5, 3.0)]
    assert combined([[], ["1 2 3"]]) == []


def test_the_first_evaluation_that_is_good_enough_counts() -> None:
    assert reached([(1.0, 2.0), (2.0, 1.5), (3.0, 1.0), (4.0, 1.6)], 1.5) == 2.0
    assert reached([(1.0, 2.0)], 1.5) is None


def test_each_peer_is_known() -> None:
    assert set(PEERS.values()) == set(SYSTEMS)
    assert not set(PEERS) & set(OURS)


def test_each_takes_its_fastest_rate_and_seeds_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(batch=1, loss=1.0, rates=(0.1, 0.2, 0.4), evaluated=1, sleep_s=0.0)
    monkeypatch.setattr(quality, "PROBLEMS", {"small": problem})
    monkeypatch.setattr(quality, "PARTS", ("small 1 Gbit/s", "small 100 Mbit/s"))
    monkeypatch.setattr(quality, "machines", lambda *_, **__: nullcontext())
    done: list[tuple[str, float, int, float]] = []

    def one_run(place: object, name: str, system: str, lr: float, seed: int, cap_s: float) -> Run:
        if system == "gossip" and seed == 2:
            raise ZmqTrainError("lost")
        done.append((system, lr, seed, cap_s))
        seconds = {REFERENCE: {0.1: 20.0, 0.2: 10.0, 0.4: 15.0}, "all-reduce": {0.1: 50.0, 0.2: 9.0, 0.4: 8.0}}
        return Run(min(cap_s, seconds.get(system, {}).get(lr, 100.0) + seed), 1.0, 2.0, 0.5)

    monkeypatch.setattr(quality, "one_run", one_run)
    cases = list(bench_quality(data="there", systems=["all-reduce", "gossip"]))
    assert done[:6] == [
        (REFERENCE, 0.1, 1, 180.0), (REFERENCE, 0.2, 1, 21.0), (REFERENCE, 0.4, 1, 11.0),
        ("all-reduce", 0.1, 1, 33.0), ("all-reduce", 0.2, 1, 33.0), ("all-reduce", 0.4, 1, 10.0),
    ]  # fmt: skip
    assert [each[:3] for each in done[9:13]] == [
        (REFERENCE, 0.2, 2), ("all-reduce", 0.4, 2), (REFERENCE, 0.2, 3), ("all-reduce", 0.4, 3),
    ]  # fmt: skip
    assert [each[:3] for each in done[13:15]] == [(REFERENCE, 0.2, 1), ("all-reduce", 0.4, 1)]  # the second network
    values = {case["case"]: case for case in cases}
    first = values["small, 1 Gbit/s, all-reduce"]
    assert (first["value"], first["peer"], first["peer_value"]) == (10.0, REFERENCE, 12.0)
    assert not any("gossip" in case for case in values)  # it failed


def test_the_picture_has_the_medians_and_a_star_for_the_fastest() -> None:
    measured = {REFERENCE: Runs(0.1, [Run(9.0, 1.0, 2.0, 0.5)]), "servers, sync": Runs(0.1, [Run(4.0, 1.0, 2.0, 0.5)])}
    lines = [json.dumps(case) for case in rows("cifar, 1 Gbit/s", measured)]
    drawn = runpy.run_path(str(DOCS / "make_quality.py"))["picture"](lines)
    assert "CIFARNet on CIFAR-10 to 1.7, 1 Gbit/s: seconds" in drawn
    assert "servers, sync: zmqtrain 4" in drawn
    assert f"{REFERENCE}: others 9" in drawn
    assert drawn.count(">*<") == 1
    assert "processor" not in drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": ["cifar"]}, f"no part 'cifar'; there are {PARTS[0]}"),
        ({"systems": ["mpi"]}, "no system 'mpi'; there are all-reduce"),
        ({}, "needs --data"),
    ],
)
def test_what_it_needs_is_said(arguments: dict[str, list[str]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(bench_quality(**arguments))  # type: ignore[arg-type]
