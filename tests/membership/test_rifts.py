"""Who is replaced if workers have lost touch with each other, although their processes have not ended."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from tests.membership.table import TIMEOUTS, Table, members
from zmqtrain.membership.rifts import Life, Rifts
from zmqtrain.membership.state import State


def decided(pairs: Collection[tuple[int, int]], *, here: Callable[[Life], bool] = lambda _: True, late: int = -1) -> list[str]:
    rifts = Rifts(2.0)
    for one, other in pairs:
        rifts.note((f"worker/{one}", 1), (f"worker/{other}", 1), "no connection for 6 s", 10.0)

    def last(peer: str) -> tuple[bool, int]:
        number = int(peer.removeprefix("worker/"))
        return number == late, number

    assert rifts.settle(11.9, here, last) == []
    found = rifts.settle(12.0, here, last)
    assert rifts.deadlines() == []
    return [gone.peer for gone in found]


@pytest.mark.parametrize("named_by", ["the others", "itself", "all"])
def test_one_that_all_have_lost_touch_with_goes(named_by: str) -> None:
    theirs, own = [(0, 1), (2, 1), (3, 1)], [(1, 3), (1, 2), (1, 0)]
    assert decided({"the others": theirs, "itself": own, "all": theirs + own}[named_by]) == ["worker/1"]


def test_of_two_the_later_one_goes_and_one_that_is_not_ready_before_it() -> None:
    assert decided([(0, 3)]) == ["worker/3"]
    assert decided([(0, 3)], late=0) == ["worker/0"]


def test_no_rift_is_left_and_no_more_go_than_that_takes() -> None:
    assert decided([(0, 1), (2, 3)]) == ["worker/3", "worker/1"]
    halves = [(one, other) for one in (0, 1, 2) for other in (3, 4)]
    assert sorted(decided(halves)) == ["worker/3", "worker/4"]


def test_a_rift_with_one_that_is_gone_is_none() -> None:
    assert decided([(0, 1), (2, 1)], here=lambda life: life[0] != "worker/1") == []


def table(*, elastic: bool = True) -> Table:
    found = Table(members(4, 0, 4), elastic=elastic)
    found.join_all()
    return found


def rift(of: Table, peer: str, other: str, process: int = 1) -> None:
    of.take(of.roster.handle_rift(peer, other, process, "no connection for 6 s", of.now))


def pass_on(of: Table) -> None:
    of.now += TIMEOUTS.grace_s
    of.take(of.roster.tick(of.now))


def test_the_run_goes_on_without_the_one_and_says_why() -> None:
    of = table()
    for peer in ("worker/0", "worker/1", "worker/3"):
        rift(of, peer, "worker/2")
    assert of.roster.next_deadline() is not None
    pass_on(of)
    assert of.roster.state is State.RUNNING
    view = of.roster.view()
    assert [member.peer for member in view.workers()] == ["worker/0", "worker/1", "worker/3"]
    assert view.lost["worker/2"] == "it and 3 others have lost touch with each other: no connection for 6 s"
    assert "worker/2" in of.dropped


def test_it_is_for_processes_that_are_there_in_runs_that_go_on_without_some() -> None:
    of = table()
    rift(of, "worker/0", "worker/2", process=7)
    rift(of, "worker/0", "agent/h1")
    rift(of, "stranger", "worker/0")
    pass_on(of)
    assert len(of.roster.view().workers()) == 4
    fixed = table(elastic=False)
    rift(fixed, "worker/0", "worker/2")
    pass_on(fixed)
    assert fixed.roster.state is State.RUNNING


def servers() -> Table:
    """Two workers, and two servers of which each has a copy of what the other one has."""
    of = Table(members(workers=2, servers=2), elastic=True, replicated=True)
    of.join_all()
    for shard, (head, backup) in enumerate((("server/0", "server/1"), ("server/1", "server/0"))):
        of.take(of.roster.handle_backup(head, shard, backup, -1 - shard, of.now))
    return of


def test_a_server_goes_if_others_have_its_shards() -> None:
    of = servers()
    for peer in ("worker/0", "worker/1", "server/0"):
        rift(of, peer, "server/1")
    pass_on(of)
    assert of.roster.state is State.RUNNING
    assert set(of.roster.view().lost) == {"server/1"}
    assert of.roster.view().chains == (("server/0",), ("server/0",))


def test_the_last_server_with_a_shard_stays() -> None:
    of = servers()
    rift(of, "worker/0", "server/1")
    rift(of, "worker/1", "server/0")
    rift(of, "server/0", "server/1")
    pass_on(of)
    assert of.roster.state is State.RUNNING
    assert len([chain for chain in of.roster.view().chains if chain]) == 2
    alone = Table(members(workers=2, servers=2), elastic=True, replicated=True)
    alone.join_all()
    rift(alone, "worker/0", "server/1")  # nobody has a copy yet
    pass_on(alone)
    assert not alone.roster.view().lost


def test_one_that_is_to_get_a_copy_goes_if_its_link_to_the_server_of_the_shard_is_lost() -> None:
    of = Table(members(workers=2, servers=2), elastic=True, replicated=True)
    of.join_all()
    of.take(of.roster.handle_backup("server/0", 0, "server/1", 1001, of.now))
    of.take(of.roster.handle_backup("server/1", 1, "server/0", 1003, of.now))
    of.take(of.roster.handle_hand_over("server/1", 1, "server/0", 1004, of.now))
    of.take(of.roster.handle_without_backup("server/0", 0, "server/1", 1005, of.now))
    of.take(of.roster.handle_without_backup("server/0", 1, "server/1", 1006, of.now))
    rift(of, "server/0", "server/1")
    pass_on(of)
    assert set(of.roster.view().lost) == {"server/1"}
