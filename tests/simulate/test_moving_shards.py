"""Shards that move to other servers while training goes on: whole runs in simulated time. The auditor compares what is served in
the end with one process, bit by bit, and every copy with the one that serves; it counts every batch and every answer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulate.test_training import Recipe, topology_of
from tests.simulate.worlds import POLICIES, servers_topology
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.run.faults import Fault, delay, drain, kill, pause, restart, shutdown
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.schema import Topology

VICTIMS = ("server/1", "server/2", "server/0", "worker/1", COORDINATOR)
#: Seconds after a host was asked to leave: its shard is copied, handed over, and copied again within 1.5 ms.
MOMENTS = (0.0001, 0.0003, 0.0005, 0.0007, 0.0009, 0.0011, 0.0013, 0.0016)


class Heard:
    """What the coordinator has recorded."""

    def __init__(self) -> None:
        self.moved: list[tuple[int, str, str]] = []  # shard, from, to
        self.left: list[str] = []
        self.lost: list[str] = []
        self.alone: list[int] = []
        """Shards that were on one server only, once there had been a first copy."""

    def event(self, kind: str, values: Mapping[str, Any]) -> None:
        match kind:
            case "moved":
                self.moved.append((values["shard"], values["before"], values["server"]))
            case "backup" if values["backup"] is None:
                self.alone.append(values["shard"])
            case "leave":
                self.left.append(values["peer"])
            case "lost":
                self.lost.append(values["peer"])


def run(faults: Sequence[Fault], staleness: str, *, seed: int = 1, **how: Any) -> tuple[Result, Heard]:
    heard = Heard()
    topology = servers_topology(staleness, **{"servers": 3, "exchange": "replicas = 1", "count": 1, **how})
    result = simulate(topology, seed=seed, options=Options(faults=faults, on_event=heard.event))
    assert result.broken == []
    return result, heard


def survives(faults: Sequence[Fault], staleness: str, **how: Any) -> Heard:
    result, heard = run(faults, staleness, **how)
    assert result.ending.status == "done", result.ending.error
    assert result.seconds < 15
    return heard


@pytest.mark.parametrize(("staleness", "epochs"), list(zip(POLICIES, (True, False, True, False), strict=True)))
def test_a_host_leaves_and_its_shard_is_never_on_one_server_only(staleness: str, epochs: bool) -> None:
    """The other half of the combinations runs without replicas, below."""
    heard = survives([drain("s2", at=0.012)], staleness, epochs=epochs)
    assert heard.moved == [(1, "server/1", "server/2")]  # its backup, which has it already
    assert heard.left.index("agent/s2") < heard.left.index("worker/0")  # training went on without it
    assert heard.lost == ["server/1"]
    assert heard.alone == []


def test_a_host_leaves_because_the_file_says_so() -> None:
    heard, faults = Heard(), [{"kind": "drain", "target": "s2", "step": 6}]
    asked = servers_topology('"async"', servers=3, **ONCE).model_dump(exclude_unset=True) | {"faults": faults}
    result = simulate(Topology.from_dict(asked), options=Options(on_event=heard.event))
    assert (result.ending.status, result.broken) == ("done", [])
    assert heard.moved == [(1, "server/1", "server/0")]
    assert "agent/s2" in heard.left


@pytest.mark.parametrize("staleness", POLICIES)
@pytest.mark.parametrize("how", [{}, {"exchange": "", "job": "elastic = true"}], ids=["replicas", "once"])
def test_a_host_that_is_shut_down_leaves_as_one_that_is_asked_to(staleness: str, how: dict[str, str]) -> None:
    """Its agent gets SIGTERM. The auditor requires all batches of both epochs."""
    heard = survives([shutdown("s2", at=0.012)], staleness, epochs=True, **how)
    assert [(shard, before) for shard, before, _ in heard.moved] == [(1, "server/1")]
    assert heard.left.index("agent/s2") < heard.left.index("worker/0")
    assert heard.lost == ["server/1"]


def test_a_host_that_the_run_needs_ends_it_when_it_is_shut_down_and_says_why() -> None:
    result, _ = run([shutdown("s2", at=0.008), shutdown("s1", at=0.016)], '"async"', servers=2, epochs=True)
    assert (result.ending.status, result.ending.exit_code) == ("halted", 143)
    message = str((result.ending.error or {})["message"])
    assert message.startswith("the agent of s1 was told to end (SIGTERM); the run cannot continue without s1: server/1 runs there")


def test_a_shard_that_does_not_move_in_time_ends_the_run() -> None:
    """Before the machine is switched off."""
    stands = pause("server/1", 2.0, at=0.011)
    result, _ = run([stands, shutdown("s2", at=0.012)], '"async"', epochs=True, exchange="", job="elastic = true")
    assert (result.ending.status, result.ending.exit_code) == ("halted", 143)
    assert "what its model servers have had not moved" in str((result.ending.error or {})["message"])
    assert result.seconds < 5


def test_hosts_leave_until_one_server_has_all() -> None:
    heard = survives([drain("s1", at=0.008), drain("s3", at=0.012)], '"sync"')
    assert {"agent/s1", "agent/s3"} <= set(heard.left[:4])
    assert [shard for shard, _, to in heard.moved if to == "server/1"] == [0, 2]
    assert sorted(heard.alone) == [0, 1, 2]  # with a warning that says so


def test_hosts_leave_at_the_same_time() -> None:
    heard = survives([drain("s1", at=0.01), drain("s2", at=0.01)], '"async"', servers=4, epochs=True)
    assert heard.left[:2] == ["agent/s1", "agent/s2"]
    assert {to for _, _, to in heard.moved} == {"server/0", "server/1"}
    assert heard.alone == []


def test_a_host_with_the_last_server_stays() -> None:
    heard = survives([drain("s1", at=0.008), drain("s2", at=0.014)], '"async"', servers=2)
    assert heard.left[0] == "agent/s1"
    assert "server/0" in heard.left  # to the end


#: A run that does not keep shards twice.
ONCE = {"exchange": "", "job": "elastic = true"}


@pytest.mark.parametrize(("staleness", "epochs"), list(zip(POLICIES, (False, True, False, True), strict=True)))
def test_without_replicas_a_shard_moves_to_the_server_that_serves_the_fewest(staleness: str, epochs: bool) -> None:
    heard = survives([drain("s2", at=0.010), drain("s3", at=0.016)], staleness, epochs=epochs, **ONCE)
    assert heard.moved[0] == (1, "server/1", "server/0")
    assert sorted(heard.moved[1:]) == [(0, "server/0", "server/2"), (1, "server/0", "server/2")]
    assert heard.left[:2] == ["agent/s2", "agent/s3"]
    assert heard.lost == ["server/1", "server/0"]


@pytest.mark.parametrize("victim", ["server/0", "worker/1", COORDINATOR])
def test_without_replicas_one_is_killed_before_a_shard_is_handed_over(victim: str) -> None:
    """``server/0`` has shards of its own, so it must not be the one that is lost; server/1 hands its shard to server/2 then."""
    for policy, after in zip(POLICIES, MOMENTS, strict=False):
        fault = restart(victim, at=0.012 + after, after=0.002) if victim == COORDINATOR else kill(victim, at=0.012 + after)
        result, heard = run([drain("s2", at=0.012), fault], policy, epochs=True, **ONCE)
        assert result.ending.status == ("failed" if victim == "server/0" else "done")
        assert victim == "server/0" or heard.moved == [(1, "server/1", "server/0")]


@pytest.mark.parametrize("staleness", POLICIES)
def test_beside_an_fc_server_the_shards_of_model_servers_move(staleness: str) -> None:
    """What the FC server has stays, and so does its host (in this world it shares one with server/0)."""
    heard = survives([drain("s2", at=0.010), drain("s3", at=0.014)], staleness, **{**ONCE, "exchange": "merged_fc = true"})
    assert heard.moved == [(1, "server/1", "server/0")]
    assert "server/1" in heard.lost
    assert "fc/0" in heard.left


def test_a_lost_server_that_has_nothing_any_more_is_gone_on_without() -> None:
    heard = survives([drain("s2", at=0.010), kill("server/1", at=0.0115)], '"async"', epochs=True, **ONCE)
    assert heard.moved == [(1, "server/1", "server/0")]


def test_a_host_stays_with_a_server_of_a_run_that_does_not_ask_to_be_elastic() -> None:
    heard = survives([drain("s1", at=0.008)], '"async"', exchange="")
    assert heard.moved == []
    assert {"server/0", "server/1", "server/2"} <= set(heard.left)


@pytest.mark.parametrize(("number", "victim"), list(enumerate(VICTIMS)))
@pytest.mark.parametrize(("policy", "staleness"), list(enumerate(POLICIES)))
def test_one_is_killed_while_a_shard_moves(policy: int, staleness: str, number: int, victim: str) -> None:
    """``server/1`` leaves: its backup server/2 serves next, and server/0 gets the copy.

    Each victim under each policy, at one moment: each victim and each policy meets four of them, and each moment two or more."""
    after = MOMENTS[(number + policy) % 4 + 4 * (number % 2 ^ policy // 2)]
    fault = restart(victim, at=0.005 + after, after=0.002) if victim == COORDINATOR else kill(victim, at=0.005 + after)
    heard = survives([drain("s2", at=0.005), fault], staleness, epochs=True)
    assert not any(to == "server/1" for _, _, to in heard.moved)


@pytest.mark.parametrize("staleness", POLICIES)
def test_a_server_that_comes_back_gets_a_shard_again(staleness: str) -> None:
    """The other one serves both meanwhile."""
    heard = survives([restart("server/1", at=0.008, after=0.003)], staleness, servers=2, epochs=True)
    assert [(before, to) for _, before, to in heard.moved] == [("server/0", "server/1")]


@pytest.mark.parametrize("staleness", ['"async"', '"sync"'])
def test_nothing_is_handed_over_before_the_next_server_has_carried_it_out(staleness: str) -> None:
    """What that one acknowledges arrives late."""
    slow = delay("server/1", 40.0, at=0.0095, lasts=5.0)
    heard = survives([restart("server/1", at=0.006, after=0.003), slow], staleness, servers=2, epochs=True, seed=0)
    assert [(before, to) for _, before, to in heard.moved] == [("server/0", "server/1")]


def faults_of(draw: random.Random, servers: int) -> list[Fault]:
    """Hosts leave at any moment, and others are lost soon after."""
    at = draw.uniform(0.001, 0.03)
    leaving = draw.sample(range(servers), draw.randint(1, servers - 1))
    faults = []
    for number in leaving:
        faults.append(drain(f"s{servers - number}", at=at))
        at += draw.choice((draw.uniform(0, 0.002), draw.uniform(0, 0.01)))
    for _ in range(draw.choice((0, 1, 1, 2))):
        near = (faults[0].at or 0.0) + draw.uniform(0.0, 0.004)
        servers_hit = [f"server/{draw.choice(leaving)}", f"server/{draw.randrange(servers)}"]
        who = draw.choice([*servers_hit, f"worker/{draw.randrange(3)}"])
        faults.append(draw.choice((kill(who, at=near), restart(who, at=near, after=0.003), pause(who, 60.0, at=near))))
    return faults


@pytest.mark.parametrize("seed", range(8))
def test_random_moves_and_losses_break_nothing(seed: int) -> None:
    """Where nobody has a shard any more, the run may end; the auditor knows."""
    draw = random.Random(seed)
    servers = draw.choice((2, 3, 4))
    job = draw.choice(("", "eval_every = 5", "checkpoint_every = 4\neval_every = 6"))
    epochs, replicas = draw.random() < 0.5, seed // len(POLICIES) % 2
    how = {"job": f"elastic = true\n{job}", "exchange": f"replicas = {replicas}", "servers": servers, "epochs": epochs}
    run(faults_of(draw, servers), POLICIES[seed % len(POLICIES)], seed=seed, **how)


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_synchronous_run_ends_with_the_same_bits_as_one_in_which_nothing_moves(tmp_path: Path, replicas: int) -> None:
    """Torch in double precision, with an optimizer that has a state; and one process on the whole batches is as near as ever."""
    hosts = [{"name": "h[1-2]", "slots": 1}, {"name": "s[1-3]", "slots": 1}]
    exchange = {"shards": 3, "replicas": replicas, "split_size": "256 B"}
    asked = topology_of(tmp_path, 2, 1, hosts=hosts, exchange=exchange, job={"checkpoint_every": 2, "elastic": True})
    found = []
    for faults in ((), (drain("s2", step=2),), (drain("s3", step=2), drain("s1", step=4))):
        recipe, heard = Recipe(), Heard()
        checkpoints = tmp_path / str(len(found)) / "checkpoints"
        checkpoints.mkdir(parents=True)
        options = Options(faults=faults, task=recipe.task(), checkpoints=checkpoints, on_event=heard.event)
        result = simulate(asked, options=options)
        assert (result.ending.status, result.broken) == ("done", []), result.ending.error
        assert len(heard.moved) >= len(faults)
        assert {path.name for path in checkpoints.iterdir()} >= {"step-00000006"}
        found.append([model.state_dict() for model in recipe.models])
        for mine, its in zip(recipe.alone().parameters(), recipe.models[0].parameters(), strict=True):
            torch.testing.assert_close(its, mine, rtol=1e-12, atol=1e-13)
    for models in found[1:]:
        for model, before in zip(models, found[0], strict=True):
            assert all(torch.equal(model[name], before[name]) for name in before)
