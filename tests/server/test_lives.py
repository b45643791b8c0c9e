"""Who trains with a shard, and who has finished, when workers are lost and come: without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from zmqtrain.data.teams import Change, Team
from zmqtrain.net.endpoint import PeerId
from zmqtrain.server.lives import Lives

WORKERS = ["worker/0", "worker/1", "worker/2"]


class Groups:
    """Implements `zmqtrain.server.lives.Seats` for groups of which nothing is expected."""

    def __init__(self) -> None:
        self.lives: dict[int, int] = {}
        self.teams: dict[int, tuple[PeerId, ...]] = {}

    async def drop(self, group: int) -> None:
        pass

    def hold(self, group: int) -> None:
        pass

    async def follow(self, group: int, life: int, first: int) -> None:
        pass

    async def enter(self, step: int, lives: Mapping[int, int]) -> None:
        pass

    async def rest(self, group: int) -> None:
        pass

    def progress(self, life: int) -> tuple[int, int] | None:
        return None


VERSIONS = count(1)


def from_step(since: int, lives: Mapping[PeerId, int]) -> Change:
    return Change(since, tuple(Team.alone(peer, life) for peer, life in lives.items()), {}, next(VERSIONS))


async def test_a_change_that_is_the_same_as_an_earlier_one_counts_too() -> None:
    """One came and was lost again before it began: whoever comes next must learn that it had no part in the step."""
    lives = Lives(Groups(), [[worker] for worker in WORKERS], [0, [["worker/0", 10], ["worker/1", 11], ["worker/2", 12]], 0, []])
    without, with_it = {"worker/1": 11, "worker/2": 12}, {"worker/0": 20, "worker/1": 11, "worker/2": 12}
    changes = [from_step(10, without), from_step(10, with_it), from_step(10, without)]
    for change in (*changes, changes[1]):  # the last one is told late, by one of those who said so before
        await lives.change(change)
    history: Any = lives.history()
    assert [[name for name, *_ in teams] for _, teams, _, _ in history[1]] == [[*without], [*with_it], [*without]]
    assert lives.training == without


async def test_who_has_finished_before_a_change_was_known_has_finished() -> None:
    """Otherwise servers waited for it until they were ended from outside, and nobody heard what they had counted."""
    lives = Lives(Groups(), [[worker] for worker in WORKERS], [0, [["worker/0", 10], ["worker/1", 11], ["worker/2", 12]], 0, []])
    await lives.drop("worker/1", 11)
    lives.finish("worker/0", 10)
    await lives.change(from_step(14, {"worker/0": 10, "worker/1": 21, "worker/2": 12}))
    lives.finish("worker/2", 12)
    assert not lives.ended
    await lives.drop("worker/1", 21)
    assert lives.ended


async def test_a_group_rests_once_all_of_its_team_say_so() -> None:
    """Another row of it may still have to push its pieces of the last step."""

    rested: list[int] = []

    class Resting(Groups):
        async def rest(self, group: int) -> None:
            rested.append(group)

    groups, pairs = Resting(), [["worker/0", "worker/1"], ["worker/2", "worker/3"]]
    teams = [Team(name, life, ((name, 0), (mate, 0))) for life, (name, mate) in enumerate(pairs)]
    lives = Lives(groups, pairs, [0, [team.to_value() for team in teams], 0, []])
    await lives.rest("worker/2", 0)
    await lives.rest("worker/2", 0)  # asked once more
    assert rested == []
    await lives.change(Change(4, (teams[1],), {}, next(VERSIONS)))
    await lives.rest("worker/3", 0)  # said before it knew
    await lives.rest("worker/3", 4)
    assert rested == []
    await lives.rest("worker/2", 4)
    assert rested == [1]


async def test_another_process_of_one_that_has_finished_has_not() -> None:
    lives = Lives(Groups(), [[worker] for worker in WORKERS[:2]], [0, [["worker/0", 10], ["worker/1", 11]], 0, []])
    lives.finish("worker/0", 10)
    await lives.change(from_step(3, {"worker/0": 20, "worker/1": 11}))
    lives.finish("worker/1", 11)
    lives.finish("worker/0", 10)  # the one before
    assert not lives.ended
    lives.finish("worker/0", 20)
    assert lives.ended


async def test_who_has_come_too_late_is_not_waited_for_when_all_have_left() -> None:
    """It had a part in the change, but left before it began, and told no server."""
    lives = Lives(Groups(), [[worker] for worker in WORKERS[:2]], [0, [["worker/0", 10], ["worker/1", 11]], 0, []])
    await lives.drop("worker/1", 11)
    await lives.change(from_step(14, {"worker/0": 10, "worker/1": 21}))
    lives.finish("worker/0", 10)
    assert not lives.ended
    lives.finish_all()
    assert lives.ended
