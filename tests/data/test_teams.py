"""Teams of groups that lose workers, and get others."""

from __future__ import annotations

import pytest

from zmqtrain.data.teams import Team, first_teams, next_teams, owner_of, teams_of

GROUPS = (("worker/0", "worker/1"), ("worker/2", "worker/3"))
ALL = {"worker/0": 7, "worker/1": 8, "worker/2": 9, "worker/3": 10}


def without(*lost: str, **come: int) -> dict[str, int]:
    return {peer: process for peer, process in ALL.items() if peer not in lost} | come


def test_only_the_group_that_has_lost_a_worker_has_another_team() -> None:
    first = first_teams(GROUPS, ALL)
    assert [team.unit for team in first] == [("worker/0", 0), ("worker/2", 1)]
    second = next_teams(GROUPS, without("worker/0"), first, 5)
    assert second[1] is first[1]
    assert second[0].name == "worker/0", "a group keeps its name"
    assert second[0].peers == ("worker/1",)


def test_a_team_that_is_as_it_was_before_the_last_change_has_another_life_nevertheless() -> None:
    first = first_teams(GROUPS, without("worker/1"))
    second = next_teams(GROUPS, ALL, first, 5)
    third = next_teams(GROUPS, without("worker/1"), second, 6)
    assert third[0].members == first[0].members
    lives = {team.unit for teams in (first, second, third) for team in teams}
    assert len(lives) == 4


def test_a_group_without_workers_has_no_team_until_others_come() -> None:
    first = first_teams(GROUPS, ALL)
    second = next_teams(GROUPS, without("worker/2", "worker/3"), first, 5)
    assert [team.name for team in second] == ["worker/0"]
    third = next_teams(GROUPS, {**without("worker/2"), "worker/3": 11}, second, 6)
    assert third[1].members == (("worker/3", 11),)


def test_those_who_are_there_have_the_parts_of_all() -> None:
    assert [owner_of(position, ("a", "b", "c")) for position in range(4)] == ["a", "b", "c", "a"]
    assert [owner_of(position, ("b",)) for position in range(2)] == ["b", "b"]


def test_teams_travel_as_values() -> None:
    teams = (*first_teams(GROUPS, ALL), Team.alone("worker/4", 3))
    assert teams_of([team.to_value() for team in teams]) == teams
    assert Team.alone("worker/4", 3).to_value() == ["worker/4", 3]


@pytest.mark.parametrize("row", [[], ["worker/0"], ["worker/0", "1"], ["worker/0", 1, [["worker/0"]]], ["worker/0", 1, [], 2], 5])
def test_anything_else_is_refused(row: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        teams_of([row])  # type: ignore[list-item]
