"""FC servers with ``replicas = 1`` may be lost: whole runs in simulated time. The auditor counts every batch in the merged layers,
on each copy of them. With torch, the result is compared with one process, in double precision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.simulate import merged_model
from tests.simulate.merged_model import MERGED, Recipe, close, like, require
from tests.simulate.worlds import POLICIES, STEPS, copied_topology, run
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.run.faults import Fault, corrupt, kill, partition, pause, restart
from zmqtrain.simulate.explore import explore
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import Checkpoint, find_checkpoints


def heard(shape: Topology, *faults: Fault, **options: Any) -> tuple[Result, list[tuple[str, dict[str, Any]]]]:
    """A run, and the events of roles and of the members that say who has a copy."""
    events: list[tuple[str, dict[str, Any]]] = []

    def hear(peer: str, reported: Sequence[Any]) -> None:
        events.extend((f"{peer} {each['kind']}", each["values"]) for each in reported if each["kind"] in ("took over", "copied"))

    return simulate(shape, options=Options(faults=faults, on_report=hear, **options)), events


def test_the_two_are_on_different_hosts() -> None:
    assert [role.host for role in place(copied_topology('"async"')).fc_roles] == ["f2", "f1"]


@pytest.mark.parametrize("staleness", POLICIES)
@pytest.mark.parametrize("server", ["fc/0", "fc/1"])
def test_the_other_one_goes_on(staleness: str, server: str) -> None:
    steps, views, seconds = run(copied_topology(staleness, epochs=True), kill(server, at=0.03))
    assert sum(map(len, steps.values())) >= 60
    assert views == []  # no worker is lost
    assert seconds < 1  # nobody waits for a time-out


@pytest.mark.parametrize("staleness", ['"async"', '"sync"'])
def test_one_that_is_started_again_gets_a_copy_and_serves_when_the_other_one_is_lost(staleness: str) -> None:
    shape = copied_topology(staleness, epochs=True, count=4, job="restarts = 1")
    result, events = heard(shape, kill("fc/0", at=0.03), kill("fc/1", at=0.3))
    assert (result.ending.status, result.broken) == ("done", [])
    of_fc = [name for name, values in events if values["shard"] == 2]
    assert of_fc == ["fc/1 took over", "fc/1 copied", "fc/0 took over", "fc/0 copied"]


@pytest.mark.parametrize("staleness", POLICIES)
def test_together_with_a_worker_or_a_model_server(staleness: str) -> None:
    shape = copied_topology(staleness, epochs=True, job="restarts = 1")
    run(shape, kill("fc/0", at=0.03), kill("worker/1", at=0.0305))
    run(shape, kill("worker/1", at=0.03), kill("fc/0", at=0.0302))
    run(shape, kill("server/0", at=0.03), kill("fc/0", at=0.0302))


@pytest.mark.parametrize("at", [0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004])
def test_before_the_first_copy_the_run_ends_and_names_it(at: float) -> None:
    """Until the FC server has a copy, it is needed; then it is not."""
    result, events = heard(copied_topology('"async"'), kill("fc/0", at=at))
    assert result.broken == []
    took_over = any(name == "fc/1 took over" for name, _ in events)
    assert (result.ending.status == "done") is took_over
    if not took_over:
        assert "fc/0" in str((result.ending.error or {}).get("message"))


def test_both_at_once_end_the_run_and_the_last_one_is_named() -> None:
    result, _ = heard(copied_topology('"sync"'), kill("fc/0", at=0.03), kill("fc/1", at=0.03))
    assert (result.ending.status, result.broken) == ("failed", [])
    assert "fc/" in str((result.ending.error or {}).get("message"))


def test_with_one_host_left_it_goes_on_without_a_copy() -> None:
    steps, _, _ = run(copied_topology('"async"', hosts=1), kill("fc/0", at=0.03))
    assert sum(map(len, steps.values())) == 3 * STEPS


def test_a_damaged_message_between_two_servers_is_no_wait_for_ever() -> None:
    """It ends the link between two model servers while their first copies are on their way."""
    shape = copied_topology('"async"', job="restarts = 2")
    for at in (0.002, 0.0021, 0.0022):
        result, _ = heard(shape, corrupt("server/1", to="server/0", at=at))
        assert result.broken == []
        assert result.seconds < 20  # and not ten times the time-out


@pytest.mark.parametrize("target", ["s1", "f1", "f2", "h2"])
def test_a_host_that_stands_still_for_so_long_that_its_links_are_lost(target: str) -> None:
    """The coordinator learns of that from the others; each of them waited in turn, until 26 s (seeds 1177 and 1932 of
    benchmarks/shapes/merged-copied.toml)."""
    shape = copied_topology('"async"', epochs=True, job="restarts = 2")
    _, _, seconds = run(shape, restart(COORDINATOR, at=0.02, after=0.001), pause(target, 3.4, at=0.03))
    assert seconds < 10


def test_the_two_cannot_reach_each_other_ever() -> None:
    """The one that workers ask goes on without a copy."""
    _, _, seconds = run(copied_topology('"async"', epochs=True), partition(["f1"], ["f2"], at=0.03))
    assert seconds < 20


def faults_of(draw: random.Random) -> list[Fault]:
    """Far enough apart for another copy."""
    peers, faults, at = ("worker/0", "worker/1", "worker/2", "server/0", "server/1", *("fc/0", "fc/1") * 2), [], 0.0
    for _ in range(draw.randint(1, 4)):
        peer, at, after = draw.choice(peers), at + draw.uniform(0.01, 0.07), draw.choice((0.002, 0.03))
        faults.append(draw.choice((kill(peer, at=at), restart(peer, at=at, after=after), pause(peer, 0.01, at=at))))
    return faults


@pytest.mark.parametrize("seed", range(12))
def test_random_losses_break_nothing(seed: int) -> None:
    shape = copied_topology(POLICIES[seed % 4], epochs=True, job="restarts = 3\neval_every = 3")
    run(shape, *faults_of(random.Random(seed)))


def test_random_faults_break_nothing() -> None:
    shape = copied_topology('"sync"', job="restarts = 1")
    assert [each.broken for each in explore(shape, range(4), faults="random") if each.broken] == []


# With torch.

trained = partial(merged_model.trained, hosts=6, exchange={"replicas": 1})


@pytest.mark.parametrize("norm", [False, True])
def test_the_result_is_that_of_one_process_whenever_one_is_lost(norm: bool, tmp_path: Path) -> None:
    """Also during evaluations and checkpoints, whose model is the one of one process, too."""
    recipe, job = Recipe(norm=norm), {"checkpoint_every": 2, "eval_every": 2, "restarts": 2, "groups": 1 if norm else 2}
    seconds = trained(recipe, folder=tmp_path / "0", **job).seconds
    expected = recipe.alone()
    for part in range(3, 12, 2):
        server = f"fc/{part // 2 % 2}"
        trained(recipe, kill(server, at=seconds * part / 12), folder=tmp_path / str(part), **job)
        require(recipe, expected, 1 if norm else 2, copied=True)
        model = Checkpoint(find_checkpoints(tmp_path / str(part))[-1]).part("model")[0]
        for name, its in expected.state_dict().items():
            assert close(model[name].tensor.view(its.shape), its), (part, name)


def test_one_after_the_other_and_a_copy_that_was_made_in_between() -> None:
    recipe = Recipe(norm=True)
    seconds = trained(recipe, groups=1, restarts=3).seconds
    trained(recipe, kill("fc/0", at=seconds / 4), kill("fc/1", at=seconds * 3 / 4), groups=1, restarts=3)
    require(recipe, recipe.alone(), 1, copied=True)


def test_the_copy_is_equal_in_the_end() -> None:
    recipe = Recipe()
    trained(recipe)
    expected = recipe.alone()
    assert sum(like(model, expected, MERGED) for model in recipe.models) == 2
