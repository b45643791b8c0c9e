"""`zmqtrain.plan`, as programs and notebooks call it."""

from __future__ import annotations

from typing import Any

import pytest

import zmqtrain
from zmqtrain.errors import UsageError

STUDY: dict[str, Any] = {
    "job": {"name": "study"},
    "hosts": [{"name": "node[1-8]", "slots": 1}],
    "compute": {"groups": 2, "group_size": 4, "batch_size": 256},
    "network": {"bandwidth": "10 Gbit/s", "latency": "50 us"},
    "plan": {"layers": "alexnet"},
}


def test_a_plan_has_figures_a_picture_and_a_job() -> None:
    found = zmqtrain.plan(STUDY)
    assert found.step_s == found.totals[0]["step_s"] > 0
    assert {row["groups"] for row in found.groups if row["variant"] == "as it is"} == {1, 2, 4, 8}
    assert [row["layer"] for row in found.layers][-1] == "fc8"
    assert f"grid {found.grid}" in repr(found)
    assert found.job.compute.grid == found.grid
    picture = found.plot()
    assert "planned: " in picture, "the grids beside the plan"
    assert "2 of 4: compute" in picture, "the numbers of groups"
    assert "<svg" in found._repr_html_()
    assert "<td>fc8</td>" in found._repr_html_()


def test_one_worker_is_planned_without_grids_and_groups() -> None:
    found = zmqtrain.plan(STUDY, groups=1, group_size=1)
    assert (found.grid, found.groups) == ("1x1", [])
    assert "<svg" not in found._repr_html_()


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(UsageError, match=r"plan\(\) has no setting 'group_sise'; did you mean 'group_size'"):
        zmqtrain.plan(STUDY, group_sise=2)
    with pytest.raises(UsageError, match="no model to plan for"):
        zmqtrain.plan({"job": {"name": "nothing"}})
