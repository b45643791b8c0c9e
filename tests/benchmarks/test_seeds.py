"""Seeds whose runs once broke what must always hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutations import shape
from zmqtrain.simulate.explore import try_seed

SEEDS = {
    "one of those who agree was given a newer view than the others were told": ("allreduce", 9000076),
    "a flipped bit in what comes before a state": ("gossip", 9000207),
    "the next change of the members came before the last one": ("allreduce", 20000073),
    "servers waited for a worker that had come too late, and told nobody what they had": ("servers-bounded", 20000140),
    "nobody knew any more who takes part, and a worker waited on": ("teams-sync", 20000002),
}


@pytest.mark.parametrize("why", SEEDS)
def test_they_break_nothing(why: str) -> None:
    name, seed = SEEDS[why]
    topology, horizon_s = shape(name)
    trial = try_seed(seed, topology, "random", horizon_s)
    assert (trial.status, trial.broken) == ("done", ())


def test_each_shape_says_how_it_is_tried() -> None:
    for file in sorted((Path(__file__).parents[2] / "benchmarks" / "shapes").glob("*.toml")):
        assert f"# zmqtrain simulate benchmarks/shapes/{file.name} --faults random" in file.read_text()
