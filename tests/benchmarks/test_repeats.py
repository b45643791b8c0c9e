"""A seed gives the same run, whatever else this process does, has done and has loaded."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutations import SHAPES
from zmqtrain.simulate.explore import faults_for
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.load import load_topology
from zmqtrain.topology.schema import Topology

#: Within this time, in virtual seconds, the faults of a seed occur.
HORIZON_S = 0.03


@pytest.fixture
def topology() -> Topology:
    """A grid on which torch really trains."""
    return load_topology(SHAPES / "grid-elastic.toml")


def everything(topology: Topology, seed: int) -> list[Any]:
    """All that a run says of itself, with its losses and virtual times."""
    said: list[Any] = []

    def event(kind: str, values: dict[str, Any]) -> None:
        said.append((kind, repr(values)))

    def reported(peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        said.extend((peer, repr(each)) for each in events)

    options = Options(faults=faults_for(topology, seed, "random", HORIZON_S), on_event=event, on_report=reported)
    result = simulate(topology, seed=seed, options=options)
    return [*said, result]


def test_in_any_order_and_with_other_modules(topology: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {seed: everything(topology, seed) for seed in (1, 3)}
    assert any("loss" in line for _, line in first[1][:-1])
    file = tmp_path / "something_else.py"
    file.write_text("LOADED = True\n")
    spec = importlib.util.spec_from_file_location("something_else", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "something_else", module)
    assert {seed: everything(topology, seed) for seed in (3, 1)} == first
