"""The helpers that users' tests are given."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

import zmqtrain.testing
from tests.simulate.worlds import profile_file, topology_of
from zmqtrain.errors import DeadlockError
from zmqtrain.testing import NetworkModel, Options, SimulatedNetwork, Way, explore, faults, simulate, virtual_time
from zmqtrain.wire.value import ValuePayload


@virtual_time(seed=3)
async def test_a_protocol_of_ones_own() -> None:
    network = SimulatedNetwork(NetworkModel(bandwidth=1e9, way=Way(latency=1e-3)), random.Random(3))
    a, b = network.endpoint("a", "alpha"), network.endpoint("b", "beta")
    await a.send("b", ("greeting",), ValuePayload("hello"))
    assert (await b.receive("a", ("greeting",))).meta == "hello"
    await asyncio.sleep(3600)
    assert asyncio.get_running_loop().time() > 3600
    await asyncio.gather(a.close(), b.close())


@pytest.mark.parametrize("number", [1, 2])
@virtual_time()
async def test_arguments_are_passed_on(number: int) -> None:
    assert number in (1, 2)


def test_what_would_hang_fails_at_once() -> None:
    @virtual_time()
    async def hangs() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="hangs at test_testing"):
        hangs()


def test_a_job_and_its_faults(tmp_path: Path) -> None:
    topology = topology_of(profile_file(tmp_path))
    result = simulate(topology, options=Options(faults=[faults.slow("h2", 5.0, at=0.1), faults.drop("worker/0", at=0.2)]))
    assert (result.ending.status, result.broken) == ("done", [])
    trials = list(explore(topology, range(3), faults="random"))
    assert [trial.seed for trial in trials] == [0, 1, 2]
    assert not any(trial.broken for trial in trials)


def test_all_that_is_promised_is_there() -> None:
    assert sorted(zmqtrain.testing.__all__) == zmqtrain.testing.__all__
    for name in zmqtrain.testing.__all__:
        assert hasattr(zmqtrain.testing, name)
