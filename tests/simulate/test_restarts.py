"""Runs that begin again after a loss, in the simulated world; `tests.resume` compares what they train."""

import pytest

from zmqtrain.errors import TopologyError
from zmqtrain.run.faults import Fault, join, kill, later, partition, remaining, restart
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.schema import Topology


def job(restarts: int = 1, **sections: dict[str, object]) -> Topology:
    return Topology.from_dict(
        {
            "job": {"steps": 20, "restarts": restarts, "timeout": "5 s"} | ({"min_workers_wait": "60 s"} if restarts else {}),
            "hosts": [{"name": "node[1-3]", "slots": 2}],
            "compute": {"device": "modelled", "profile": "alexnet", "batch_size": 12, **sections.get("compute", {})},
            "exchange": {"kind": "allreduce"},
            "network": {"bandwidth": "1 Gbit/s", "latency": "100 us"},
        }
    )


def run(topology: Topology, *faults: Fault) -> tuple[Result, list[tuple[str, ...]]]:
    without: list[tuple[str, ...]] = []
    options = Options(faults=faults, on_restart=lambda again, ending, step: without.append(again.without))
    result = simulate(topology, options=options)
    assert result.broken == []
    return result, without


def test_without_restarts_a_loss_ends_the_run() -> None:
    result, without = run(job(restarts=0), kill("worker/1", step=5))
    assert (result.ending.status, result.attempts, without) == ("failed", 1, [])


def test_a_killed_worker() -> None:
    result, without = run(job(), kill("worker/1", step=5))
    assert (result.ending.status, result.attempts, without) == ("done", 2, [()])


def test_a_lost_host_is_left_out() -> None:
    result, without = run(job(), kill("node2", step=5))
    assert (result.ending.status, result.attempts, without) == ("done", 2, [("node2",)])


def test_a_host_that_is_needed_and_stays_away() -> None:
    result, without = run(job(compute={"groups": 1, "group_size": 6}), kill("node2", step=5))
    assert (result.ending.status, result.ending.lost_hosts) == ("failed", ("node2",))
    assert result.attempts > 2
    assert 60 < result.seconds < 120
    assert set(without) == {()}


def test_the_rest_of_a_schedule() -> None:
    done = [kill("node1", at=1.0), kill("worker/3", at=2.0), restart("node3", at=2.5)]
    left = [kill("worker/4", step=7), partition(["node1"], ["node2"], at=2.0, lasts=4.0), join("joined-1", at=9.0)]
    assert remaining([*done, *left], done, 3.0, ["node1", "node2", "node3"]) == (
        kill("node1", at=0.0),
        *later([*done, *left], 3.0),
        kill("worker/4", step=7),
    )


@pytest.mark.parametrize("kind", ["environment", "kubernetes"])
def test_refused_where_others_start_the_agents(kind: str) -> None:
    document = {"job": {"task": "task.py", "restarts": 1}, "engine": {"kind": kind}, "compute": {"groups": 1, "group_size": 2}}
    with pytest.raises((TopologyError, ValueError), match="cannot start agents again"):
        Topology.from_dict(document)
    Topology.from_dict({**document, "exchange": {"kind": "gossip"}, "compute": {"groups": 2}})  # elastic: the agents start workers
