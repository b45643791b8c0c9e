"""A worker that comes back in the very last moment of a run, when the others end training or have left, ends in good order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.mutations import SHAPES
from zmqtrain.run.faults import restart
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.load import load_topology


@pytest.mark.parametrize(
    ("name", "seed", "worker", "at", "after"),
    [
        ("allreduce", 14, "worker/3", 0.019874067498314756, 0.004995204564504525),  # the run has ended when it asks to join
        ("teams-sync", 2, "worker/3", 0.1799432542215935, 0.016202948796607913),  # it waits for what one that has left would give
        ("servers-bounded", 7, "worker/2", 0.1719234427307391, 0.021410235196548683),  # it has begun, and there is nothing left
    ],
)
def test_it_ends_in_good_order(name: str, seed: int, worker: str, at: float, after: float) -> None:
    codes: list[int] = []

    def left(kind: str, values: Mapping[str, Any]) -> None:
        if kind == "exit" and values["peer"] == worker:
            codes.append(values["exit_code"])

    options = Options(faults=[restart(worker, at=at, after=after)], on_event=left)
    result = simulate(load_topology(SHAPES / f"{name}.toml"), seed=seed, options=options)
    assert (result.ending.status, result.broken) == ("done", [])
    assert codes == [-9, 0]
    assert result.seconds < 1.0, "nobody waits for a time-out"
