"""Settings that would have no effect are refused; those that hold anyway are not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from zmqtrain.errors import TopologyError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.plan.decided import with_plan
from zmqtrain.plan.regroup import regrouped
from zmqtrain.topology.load import load_topology
from zmqtrain.topology.overrides import Override, overridden
from zmqtrain.topology.schema import Topology

MODELLED = {"device": "modelled", "profile": "lenet"}
TWO = {"group_size": 2}
#: A plan that divides only the batch.
BATCH = Plan((LayerPlan("0", "batch", Grid(1, 2), "height"),))


def topology_of(**sections: Any) -> Topology:
    return Topology.from_dict({"job": {}, **sections})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"exchange": {"split_size": "64 KiB"}}, "split_size is for model servers"),
        ({"compute": {"rebalance_every": 5}}, "rebalance_every is for parts that are measured"),
        ({"compute": {**TWO, "parts": [2, 1], "rebalance_every": 5}}, "rebalance_every is for parts that are measured"),
        ({"compute": {**MODELLED, "noise": {"straggler_factor": 5.0}}}, "straggler_factor is for steps that take longer by chance"),
        ({"job": {"args": {"lr": 1}}}, "args is for the task's function, but there is no task"),
        ({"job": {"min_workers_wait": "5 s"}}, "min_workers_wait is for runs that wait"),
        ({"parallel": {"strict": True}}, "strict is for models that a group divides"),
        ({"compute": TWO, "parallel": {"whole": ["0"], "statistics": "local"}}, "whole is for models that a group divides"),
        ({"plan": {"dx": False}}, 'dx is for pricing = "paper"'),
        ({"plan": {"biases": True}}, "biases is for a table of layers"),
        ({"plan": {"activations": "before_pooling"}}, "activations is for a table of layers"),
        (
            {"job": {"task": "t.py"}, "data": {"shuffle": "ring", "ring": "tensors", "sample_size": "1 KiB"}},
            "sample_size is for modelled devices",
        ),
    ],
)
def test_a_setting_without_effect(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        topology_of(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"exchange": {"kind": "model_server", "split_size": "64 KiB"}},
        {"compute": {**TWO, "parts": "measured", "rebalance_every": 5}},
        {"compute": {**MODELLED, "noise": {"straggler_chance": 0.1, "straggler_factor": 5.0}}},
        {"job": {"restarts": 1, "min_workers_wait": "5 s"}},
        {"compute": {**TWO, "grid": "2x1"}, "parallel": {"strict": True, "whole": ["0"]}},
        {"compute": {**TWO, "grid": "auto"}, "parallel": {"strict": True, "whole": ["0"]}},
        {"compute": TWO, "parallel": {"statistics": "whole", "strict": True, "whole": ["0"]}},
        {"compute": {"overlap": False, "shared_memory": False}, "parallel": {"verify": False, "statistics": "local"}},
        {"optimizer": {"look_ahead": "none", "momentum": "task"}},
        {"plan": {"pricing": "paper", "dx": False, "layers": "alexnet", "biases": True}},
        {"compute": MODELLED, "data": {"shuffle": "ring", "ring": "tensors", "sample_size": "1 KiB"}},
    ],
)
def test_one_with_effect_or_that_holds_anyway(sections: dict[str, Any]) -> None:
    topology = topology_of(**sections)
    assert Topology.from_dict(topology.to_dict()) == topology, "and written out in full"


def test_what_a_plan_decides_takes_along_only_what_has_an_effect() -> None:
    auto = topology_of(compute={**TWO, "grid": "auto"}, parallel={"strict": True, "whole": ["0"]})
    found = with_plan(auto, BATCH)
    assert (found.compute.grid, found.parallel.strict, found.parallel.whole) == ("1x2", False, ())
    divided = topology_of(compute={**TWO, "grid": "auto"}, parallel={"strict": True, "statistics": "whole"})
    assert with_plan(divided, BATCH).parallel.strict


def test_other_groups_of_a_job_with_a_grid() -> None:
    """A group of one worker divides nothing."""
    topology = topology_of(compute={**TWO, "grid": "2x1"}, parallel={"strict": True, "statistics": "whole"})
    assert not regrouped(topology, 2).parallel.strict


def test_a_value_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[job]\n[exchange]\nkind = "model_server"\nsplit_size = "64 KiB"\n')
    document = {"job": {}, "exchange": {"kind": "model_server", "split_size": "64 KiB"}}
    assert load_topology(file).exchange.split_size == 65536
    override = Override(("exchange", "kind"), "allreduce", "--set exchange.kind=allreduce")
    with pytest.raises(TopologyError, match="split_size is for model servers"):
        overridden(document, [override], file="a.toml", name="a", lines={})
