"""Whether a failed run begins again, and on which hosts: pure."""

from typing import Any

import pytest

from zmqtrain.run.again import PAUSE_S, Again, Restarts
from zmqtrain.run.ending import Ending
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology

KILLED = Ending("failed", 137, {"peer": "worker/1"})


def job(restarts: int = 2, hosts: int = 3, **compute: Any) -> Topology:
    compute = compute or {"batch_size": 12}
    return Topology.from_dict(
        {
            "job": {"task": "given:task", "restarts": restarts, "min_workers_wait": "60 s"},
            "hosts": [{"name": f"node{number}", "address": f"10.0.0.{number}", "slots": 2} for number in range(1, 1 + hosts)],
            "compute": compute,
            "exchange": {"kind": "allreduce"},
            "engine": {"kind": "ssh"},
        }
    )


def restarts_of(topology: Topology, *, hosts_return: bool = False, used: int = 0) -> Restarts:
    restarts = Restarts(topology, place(topology), hosts_return=hosts_return)
    restarts.used = used
    return restarts


def lost(*hosts: str) -> Ending:
    return Ending("failed", 129, {"peer": f"agent/{hosts[0]}"}, hosts)


def after(restarts: Restarts, ending: Ending, *, began: bool = True, now: float = 0.0) -> Again:
    again = restarts.after(ending, began=began, now=now)
    assert again is not None
    return again


def names(again: Again) -> list[str]:
    return [host.name for host in again.topology.hosts]


def test_as_often_as_restarts_says() -> None:
    restarts = restarts_of(job())
    assert [after(restarts, KILLED).number, after(restarts, KILLED).number] == [1, 2]
    assert restarts.after(KILLED, began=True, now=0.0) is None


def test_restarts_under_another_launcher_count() -> None:
    assert restarts_of(job(), used=2).after(KILLED, began=True, now=0.0) is None


@pytest.mark.parametrize(
    "ending",
    [
        Ending("done", 0),
        Ending("failed", 3, {}),
        Ending("failed", 69, {}),
        Ending("halted", 129, {}),
        Ending("preempted", 138),
        Ending("interrupted", 130),
        Ending("stopped", 0),
    ],
)
def test_only_after_failures_that_another_try_may_cure(ending: Ending) -> None:
    assert restarts_of(job()).after(ending, began=True, now=0.0) is None


def test_a_run_that_has_never_begun_does_not_begin_again() -> None:
    assert restarts_of(job()).after(lost("node2"), began=False, now=0.0) is None


def test_a_killed_process_is_not_waited_for() -> None:
    again = after(restarts_of(job()), KILLED)
    assert (again.pause_s, again.without, names(again)) == (0.0, (), ["node1", "node2", "node3"])


def test_hosts_that_decide_how_many_workers_there_are_go_on_without_a_lost_one() -> None:
    restarts = restarts_of(job())
    again = after(restarts, lost("node2"))
    assert (again.without, names(again), again.topology.compute.workers) == (("node2",), ["node1", "node3"], 2)
    # It does not even begin on node3; then node1 is left.
    again = after(restarts, lost("node3"), began=False, now=5.0)
    assert (again.number, again.counts, again.without, names(again)) == (1, False, ("node2", "node3"), ["node1"])
    # Once it has trained, the next failure lets all others try again.
    again = after(restarts, lost("node1"), now=100.0)
    assert (again.number, again.counts, names(again)) == (2, True, ["node2", "node3"])


def test_the_others_take_the_roles_if_they_have_room() -> None:
    again = after(restarts_of(job(groups=1, group_size=4, batch_size=12)), lost("node1"))
    assert (names(again), again.topology.compute.workers) == (["node2", "node3"], 4)


def test_a_host_without_which_there_is_no_room_is_waited_for() -> None:
    restarts = restarts_of(job(groups=1, group_size=6, batch_size=12))
    again = after(restarts, lost("node1"), now=10.0)
    assert (again.without, len(names(again)), again.pause_s) == ((), 3, PAUSE_S)
    again = after(restarts, lost("node1"), began=False, now=69.0)
    assert (again.number, again.counts) == (1, False)
    assert restarts.after(lost("node1"), began=False, now=71.0) is None


def test_all_hosts_lost_are_waited_for() -> None:
    again = after(restarts_of(job(hosts=1)), lost("node1"))
    assert (again.without, names(again)) == ((), ["node1"])


def test_a_host_of_this_machine_is_there_again() -> None:
    again = after(restarts_of(job(), hosts_return=True), lost("node2"))
    assert (again.without, len(names(again))) == ((), 3)


@pytest.mark.parametrize("kind", ["environment", "kubernetes"])
def test_who_starts_the_agents_starts_the_run_again(kind: str) -> None:
    """Also an elastic run, whose agents start workers again while they live."""
    topology = Topology.from_dict(
        {
            "job": {"task": "given:task", "restarts": 2},
            "compute": {"groups": 2, "batch_size": 4},
            "exchange": {"kind": "gossip"},
            "engine": {"kind": kind},
        }
    )
    assert topology.elastic
    assert restarts_of(topology).after(KILLED, began=True, now=0.0) is None
