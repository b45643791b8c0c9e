"""The benchmark of efficiency: the paper's figure is in its profile, and predictions need no launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.efficiency import (
    _FIGURE,
    _GROUPS,
    BATCH,
    DATA,
    FC_S,
    OVER,
    PAPER,
    SETTLED,
    STEPS,
    WORKERS,
    paper_profile,
    predicted_of,
    simulated_s,
    update_s,
)  # fmt: skip
from benchmarks.run import run_bench
from zmqtrain.errors import UsageError
from zmqtrain.merged_fc.profile_phases import split_profile
from zmqtrain.plan.efficiency import divisors, efficiencies
from zmqtrain.topology.load import parse_topology
from zmqtrain.train.device.profile import Profile


def test_the_profile_has_the_papers_times() -> None:
    assert [round(each.seconds / FC_S, 1) for each in efficiencies(PAPER)] == [6.7, 1.9, 1, 1, 1, 1]
    conv, fc = split_profile(Profile.of(paper_profile()))
    for size in divisors(PAPER.machines):
        assert conv.step_s * conv.scaled(BATCH / size) == pytest.approx(PAPER.conv_s(size))
    assert fc.step_s * fc.scaled(BATCH) == pytest.approx(FC_S)


@pytest.mark.parametrize("groups", [16, 32])
def test_a_simulated_run_keeps_to_the_law_in_saturation(tmp_path: Path, groups: int) -> None:
    profile = tmp_path / "figure.json"
    profile.write_text(json.dumps(paper_profile()))
    topology = parse_topology(_FIGURE.format(steps=6, groups=groups, size=32 // groups, profile=profile))
    assert simulated_s(topology) == pytest.approx(FC_S, rel=0.02)


def test_all_numbers_of_groups_are_predicted() -> None:
    values = {"steps": 10, "workers": 4, "profile": "lenet", "dilation": 2}
    for merged in ("false", "true"):
        found = [
            predicted_of(parse_topology(_GROUPS.format(**values, groups=groups, size=4 // groups, merged=merged)))
            for groups in (1, 2, 4)
        ]
        assert all(each.seconds > 0 for each in found)
        assert found[-1].seconds < found[0].seconds


def test_parts_that_there_are_not() -> None:
    with pytest.raises(UsageError, match="no part 'speed'; there are figure, uneven, lenet"):
        run_bench("efficiency", parts=["speed"])
    with pytest.raises(UsageError, match="no part 'speed'; there are emulated, simulated"):
        run_bench("merged", parts=["speed"])
    with pytest.raises(UsageError, match="benchmark net has no --part"):
        run_bench("net", parts=["lenet"])
    with pytest.raises(UsageError, match="benchmark merged has no --workers"):
        run_bench("merged", workers=[8])


def test_what_is_measured_begins_when_groups_have_found_their_turns() -> None:
    """Two workers' steps take 2 s at first, and 1 s from the tenth of 40 on."""
    ends = [2.0 * min(step, 10) + max(0, step - 10) for step in range(40) for _ in range(2)]
    assert update_s(ends, 1, begin=SETTLED, end=OVER) == pytest.approx(0.5)
    assert update_s(ends, 2, begin=SETTLED, end=OVER) == pytest.approx(1.0)
    assert update_s(ends, 1, begin=0.0, end=OVER) > 0.55
    assert SETTLED * STEPS > 20


def test_the_data_is_enough_for_the_most_groups() -> None:
    assert (
        max(WORKERS)
        * parse_topology(
            _GROUPS.format(steps=1, workers=8, groups=8, size=1, profile="lenet", dilation=2, merged="false")
        ).compute.batch_size
        <= DATA
    )
