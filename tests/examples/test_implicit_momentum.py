"""Omnivore's theorem 1, shown by the real exchange and server on a simulated network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.implicit_momentum import STEP, experiment, fit
from zmqtrain.simulate.clock import run_virtual

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("groups", "updates"), [(1, 500), (4, 1000), (16, 2000)])  # more groups need more of them
def test_asynchronous_groups_act_like_momentum(groups: int, updates: int) -> None:
    """The seed is fixed; over others the fit spreads by 0.01 to 0.02 (docs/implicit-momentum.json)."""
    momentum, rate = fit(run_virtual(experiment(groups, updates=updates, seed=1)))
    assert momentum == pytest.approx(1 - 1 / groups, abs=0.05)
    assert rate == pytest.approx(STEP / groups, abs=0.01)


def test_the_documents_figures_agree_with_the_theorem() -> None:
    document = json.loads((DOCS / "implicit-momentum.json").read_text())
    for row in document["momentum"]:
        assert row["expected"] == pytest.approx(1 - 1 / row["groups"], abs=1e-4)
        for value in row["fitted"]:
            assert value == pytest.approx(row["expected"], abs=0.05)
