"""Model servers go on without the workers that are lost, and with those that come back: whole runs in simulated time. The auditor
compares what servers hold with one process, bit by bit, and counts every batch (`zmqtrain.simulate.slot_audit`)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.simulate.worlds import POLICIES, STEPS, servers_topology
from zmqtrain.run.faults import Fault, kill, pause, restart
from zmqtrain.simulate.audit import Auditor
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology


def topology(staleness: str = '"async"', *, epochs: bool = False, job: str = "") -> Topology:
    return servers_topology(staleness, servers=2, epochs=epochs, job=f"elastic = true\n{job}")


class Heard:
    """What the roles of a run report."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}
        self.views: list[tuple[str, ...]] = []

    def __call__(self, peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "step":
                self.steps.setdefault(peer, []).append(event["step"])
            elif event["kind"] == "view" and peer == "worker/0":
                self.views.append(tuple(event["values"]["members"]))


def run(faults: Sequence[Fault], staleness: str = '"async"', *, seed: int = 1, **how: Any) -> tuple[Result, Heard]:
    heard = Heard()
    result = simulate(topology(staleness, **how), seed=seed, options=Options(faults=faults, on_report=heard))
    assert result.ending.status == "done", result.ending.error
    assert result.broken == []
    return result, heard


@pytest.mark.parametrize("staleness", POLICIES)
def test_the_others_train_what_a_lost_worker_has_left(staleness: str) -> None:
    """The auditor requires all batches of both epochs."""
    result, heard = run([kill("worker/1", step=8)], staleness, epochs=True)
    assert heard.views == [("worker/0", "worker/2")]
    assert len(heard.steps["worker/0"]) > 20
    assert result.seconds < 5  # nobody waits for a time-out


@pytest.mark.parametrize("staleness", ['"async"', '"sync"'])
def test_the_first_worker_is_lost(staleness: str) -> None:
    _, heard = run([kill("worker/0", step=8)], staleness)
    assert heard.steps["worker/1"][:STEPS] == heard.steps["worker/2"][:STEPS] == list(range(STEPS))


def test_a_host_that_is_lost_without_a_word_holds_up_only_those_that_wait_for_it() -> None:
    for staleness in ('"async"', '"sync"'):
        result, _ = run([kill("h2", at=0.01)], staleness)
        assert result.seconds < 10


def test_a_worker_that_stands_still_is_gone_on_without() -> None:
    run([pause("worker/2", 60.0, at=0.01)], '"sync"', epochs=True)


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        (444, (restart("worker/0", at=0.167325, after=0.022448), kill("worker/0", at=0.204389), kill("worker/0", at=0.215671))),
        (28, (restart("worker/0", at=0.0468629, after=0.002245), restart("worker/0", at=0.219122, after=0.002245))),
        (564, (restart("worker/1", at=0.226103, after=0.022448), restart("worker/1", at=0.23973, after=0.0022448))),
    ],
)
def test_a_group_that_has_no_batch_in_the_last_step_takes_over_what_another_one_leaves(seed: int, faults: Sequence[Fault]) -> None:
    """It has the parameters of the others, since it has taken part in the step."""
    run(faults, '"sync"', seed=seed, epochs=True)


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        (215, (restart("worker/0", at=0.0594632, after=0.11224), restart("worker/1", at=0.235587, after=0.022448))),
        (410, (restart("worker/2", at=0.228462, after=0.0022448), kill("worker/1", at=0.255043))),
    ],
)
def test_a_worker_that_comes_while_servers_end_comes_too_late(seed: int, faults: Sequence[Fault]) -> None:
    run(faults, '"sync"', seed=seed, epochs=True)


@pytest.mark.parametrize("staleness", POLICIES)
def test_an_agent_starts_its_lost_worker_again(staleness: str) -> None:
    _, heard = run([kill("worker/1", step=5)], staleness, epochs=True, job="restarts = 1")
    assert [len(members) for members in heard.views] in ([2, 3], [3])
    assert heard.steps["worker/1"][-1] > 15


@pytest.mark.parametrize("staleness", ['"async"', '"sync"'])
def test_all_old_workers_are_lost_one_after_the_other(staleness: str) -> None:
    faults = [restart(f"worker/{rank}", at=0.008 + 0.006 * rank, after=0.002) for rank in range(3)]
    run(faults, staleness, epochs=True)


@pytest.mark.parametrize("staleness", ['"async"', '"sync"'])
def test_one_is_lost_when_the_others_have_trained(staleness: str) -> None:
    run([kill("worker/2", step=19)], staleness, epochs=True)
    run([kill("worker/2", step=STEPS - 1)], staleness)


@pytest.mark.parametrize("staleness", POLICIES)
def test_all_workers_are_lost_at_once_and_started_again(staleness: str) -> None:
    run([kill(f"worker/{rank}", at=0.01) for rank in range(3)], staleness, epochs=True, job="restarts = 1")


def test_workers_that_came_back_while_others_were_lost_stay() -> None:
    """Each is lost in its turn, and once only: an agent that hears of the other's loss does not end the new process of its own."""
    slow = topology('"async"', job="restarts = 2").model_dump(exclude_unset=True)
    slow["compute"] |= {"batch_size": 20_000}  # it goes on for longer than the time in which an agent ends a lost process
    lost: list[str] = []

    def hear(kind: str, values: Mapping[str, Any]) -> None:
        if kind == "lost":
            lost.append(str(values["peer"]))

    faults = [kill("worker/0", at=0.1), kill("worker/1", at=0.1), kill("worker/2", at=0.1001)]
    result = simulate(Topology.from_dict(slow), options=Options(faults=faults, on_event=hear))
    assert result.ending.status == "done", result.ending.error
    assert result.broken == []
    assert result.seconds > 1.5
    assert sorted(lost) == ["worker/0", "worker/1", "worker/2"]


def test_only_one_is_left() -> None:
    run([kill("worker/0", at=0.008), kill("worker/2", at=0.01)], '"sync"', epochs=True)


def faults_of(draw: random.Random) -> list[Fault]:
    """A few losses, pauses and returns at any moment of the run."""
    faults = []
    for _ in range(draw.randint(1, 4)):
        peer, at = f"worker/{draw.randrange(3)}", draw.uniform(0.002, 0.035)
        after = draw.choice((0.002, 0.005))
        faults.append(draw.choice((kill(peer, at=at), restart(peer, at=at, after=after), pause(peer, 0.01, at=at))))
    return faults


@pytest.mark.parametrize("seed", range(8))
def test_random_losses_break_nothing(seed: int) -> None:
    draw = random.Random(seed)
    faults = faults_of(draw)
    run(faults, POLICIES[seed % len(POLICIES)], seed=seed, epochs=seed % 8 < 4)


def test_a_lost_server_ends_the_run_and_is_named() -> None:
    result = simulate(topology(), options=Options(faults=[kill("server/1", at=0.01)]))
    assert result.ending.status == "failed"
    assert result.ending.error is not None
    assert "server/1" in str(result.ending.error["message"])
    assert result.seconds < 10


SLOW_NETWORK = """
[job]
steps = 2
timeout = "5 s"
elastic = true
restarts = 10
[[hosts]]
name = "h[1-4]"
address = "10.0.0.1"
slots = 2
[compute]
groups = 4
device = "modelled"
profile = "lenet"
bucket_size = "1 MiB"
[exchange]
kind = "model_server"
staleness = "sync"
shards = 1
[network]
bandwidth = "5 Mbit/s"
latency = "100 us"
[simulation]
payload = "phantom"
time_limit = 200
"""


def on_slow_network(faults: Sequence[Fault], text: str = SLOW_NETWORK, **options: Any) -> Result:
    result = simulate(parse_topology(text), options=Options(faults=faults, **options))
    assert result.ending.status == "done", result.ending.error
    return result


@pytest.mark.parametrize(("first", "second"), [(26.83, 28.369), (18.238, 24.438)])
def test_two_that_come_back_when_there_is_nothing_left_to_train_end_with_the_others(first: float, second: float) -> None:
    """All of them evaluate the model together. Those that trained the last step and the two, which had come one after another, each
    took others to be there, and the run ended with an error."""
    on_slow_network([restart("worker/2", at=first, after=0.1), restart("worker/3", at=second, after=0.1)])


def test_a_worker_has_no_part_in_a_step_between_two_changes() -> None:
    """All steps were trained when one was lost and another came back, but the lost one had left batches: the others go on with the
    step of the second change, and servers had heard of no rest."""
    text = SLOW_NETWORK.replace("steps = 2", "steps = 4").replace('"sync"\nshards = 1', '"async"\nshards = 2\nreplicas = 1')
    faults = [restart("worker/2", at=48.022, after=0.1), restart("worker/3", at=55.097, after=0.1)]
    assert on_slow_network(faults, text).broken == []


def test_one_that_asks_servers_that_have_ended_is_told_so() -> None:
    run([restart("worker/1", at=0.020997, after=0.0275265), restart("worker/2", at=0.0211031, after=0.0013642)], '"sync"')


def test_workers_are_lost_before_the_server_has_all_values() -> None:
    """It needs only the one that gives them."""
    began: list[float] = []
    fault = kill("worker/2", at=1.0)
    result = on_slow_network(
        [restart("worker/1", at=1.0, after=0.2), fault],
        on_audit=lambda peer, what, values: began.append(asyncio.get_running_loop().time()) if what == "applied" else None,
    )
    assert result.broken == []
    assert min(began) > 1.2


def test_a_gradient_may_count_after_its_worker_was_lost_and_is_back() -> None:
    """The auditor's own rule: a server has the gradient of step 2 when the worker is lost, and waits for the others'."""
    loaded = topology('"sync"')
    auditor = Auditor(loaded, place(loaded), clock=lambda: 0.0)

    def applied(step: int, *groups: int) -> None:
        values = {"piece": 0, "version": step + 1, "reads": [(group, step, step) for group in groups], "skipped": groups}
        auditor.hear("server/0", "applied", values)

    auditor.hear("server/0", "dropped", {"group": 2})
    applied(0, 0, 1)
    applied(1, 0, 1)
    auditor.hear("server/0", "entered", {"group": 2, "step": 2})
    auditor.hear("server/0", "dropped", {"group": 2})
    auditor.hear("server/0", "entered", {"group": 2, "step": 3})
    applied(2, 0, 1, 2)
    applied(3, 0, 1, 2)
    assert auditor._broken == []
    applied(5, 2)
    assert auditor._broken


def test_a_piece_that_nobody_has_pushed_counts_from_where_its_groups_have_entered() -> None:
    """The auditor's own rule: group 0 has come again at step 1 and has pushed another piece; group 1 has entered at step 2."""
    loaded = topology("{ bound = 1 }")
    auditor = Auditor(loaded, place(loaded), clock=lambda: 0.0)

    def applied(piece: int, version: int, group: int, step: int) -> None:
        auditor.hear(f"worker/{group}", "takes", {"step": step, "slot": 3 * step + group})
        auditor.hear("server/0", "applied", {"piece": piece, "version": version, "reads": [(group, step, 0)], "skipped": ()})

    for group in range(3):
        auditor.hear("server/0", "dropped", {"group": group})
    for group in range(2):
        auditor.hear("server/0", "entered", {"group": group, "step": 1 + group})
    applied(0, 1, 0, 1)
    applied(0, 2, 1, 2)
    applied(1, 1, 1, 2)
    assert auditor._broken == []
    applied(1, 2, 1, 3)
    assert "3 steps ahead in piece 1" in auditor._broken[0]


def test_one_that_has_come_again_may_have_nothing_to_train_at_first() -> None:
    """The auditor's own rule: group 1 was lost in step 1, has come again with step 3, and takes its first batch in step 4."""
    loaded = topology('"async"')
    auditor = Auditor(loaded, place(loaded), clock=lambda: 0.0)

    def applied(version: int, step: int) -> None:
        auditor.hear("server/0", "applied", {"piece": 0, "version": version, "reads": [(1, step, 0)], "skipped": ()})

    for step in (0, 1, 4):
        auditor.hear("worker/1", "takes", {"step": step, "slot": 3 * step + 1})
    applied(1, 0)
    auditor.hear("server/0", "dropped", {"group": 1})
    auditor.hear("server/0", "entered", {"group": 1, "step": 3})
    applied(2, 4)
    assert auditor._broken == []
    for step in (5, 6):
        auditor.hear("worker/1", "takes", {"step": step, "slot": 3 * step + 1})
    applied(3, 6)
    assert "after only 5 of its steps" in auditor._broken[0]


def test_what_a_lost_one_has_pushed_does_not_bring_it_back() -> None:
    """The auditor's own rule: group 2 has come again and is lost once more before its first step is applied."""
    loaded = topology('"sync"')
    auditor = Auditor(loaded, place(loaded), clock=lambda: 0.0)

    def applied(version: int, *reads: tuple[int, int]) -> None:
        told = {"piece": 0, "version": version, "reads": [(*read, 0) for read in reads], "skipped": ()}
        auditor.hear("server/0", "applied", told)

    for step in range(3):
        for group in range(3):
            auditor.hear(f"worker/{group}", "takes", {"step": step, "slot": 3 * step + group})
    applied(1, (0, 0), (1, 0), (2, 0))
    for what in ("dropped", "entered", "dropped"):
        auditor.hear("server/0", what, {"group": 2, "step": 1})
    applied(2, (0, 1), (1, 1), (2, 1))
    applied(3, (0, 2), (1, 2))
    assert auditor._broken == []
