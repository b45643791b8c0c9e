"""The benchmark of efficiency: the paper's figure is in its profile, and predictions need no launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zmqtrain.cli.bench.efficiency import _FIGURE, _GROUPS, BATCH, FC_S, PAPER, paper_profile, predicted_of, simulated_s
from zmqtrain.plan.efficiency import divisors, efficiencies
from zmqtrain.topology.load import parse_topology
from zmqtrain.train.device.parts import split_profile
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
