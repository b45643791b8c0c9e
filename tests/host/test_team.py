"""Processes of one host wait for each other, and never for what will not come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.host.world import MIB, ended_process, teams, together
from zmqtrain.arena import Arena, Region
from zmqtrain.arena.arena import PROCESS
from zmqtrain.errors import PeerLostError, PeerTimeoutError
from zmqtrain.host.team import MOST_TEAMS, Team, Word


@pytest.fixture
def shared() -> Iterator[Region]:
    made = Arena.create(4, 4 * MIB)
    yield made
    made.close()


def test_members_learn_each_others_places(shared: Region) -> None:
    members = teams(shared, 3)
    blocks = [[team.arena.allocate(10 * (rank + 1)) for _ in range(rank)] for rank, team in enumerate(members)]
    tables = together(lambda rank: members[rank].join([block.place for block in blocks[rank]]), 3)
    assert tables == [[[block.place for block in each] for each in blocks]] * 3


def test_teams_of_one_host_do_not_meet(shared: Region) -> None:
    arenas = [Arena.join(shared.path, rank) for rank in range(2)]
    first, last = ([Team(arenas[rank], (0, 1), rank, names="ab", number=n) for rank in range(2)] for n in (0, MOST_TEAMS - 1))
    together(lambda rank: (first[rank].join(), last[rank].join()), 2)
    first[0].set(Word.DONE, 9)
    first[1].wait(Word.DONE, 9, "x", members=[0])
    last[1].timeout_s = 0.01
    with pytest.raises(PeerTimeoutError):
        last[1].wait(Word.DONE, 9, "x", members=[0])


def test_a_wait_names_who_is_late_and_what_for(shared: Region) -> None:
    team = teams(shared, 2, timeout_s=0.05)[0]
    team.set(Word.DONE, 3)
    with pytest.raises(PeerTimeoutError, match=r"worker/1 did not answer within 0.05 s while waiting for its gradients; .*timeout"):
        team.wait(Word.DONE, 3, "its gradients")


def test_who_has_left_is_not_waited_for(shared: Region) -> None:
    one, other = teams(shared, 2)
    together(lambda rank: (one, other)[rank].join(), 2)
    one.set(Word.DONE, 5)
    leaving = threading.Timer(0.01, other.leave)
    leaving.start()
    with pytest.raises(PeerLostError, match="lost worker/1 while waiting for x: it has left"):
        one.wait(Word.DONE, 5, "x")
    leaving.join()


def test_what_was_done_before_leaving_counts(shared: Region) -> None:
    one, other = teams(shared, 2)
    other.set(Word.DONE, 5)
    one.set(Word.DONE, 5)
    other.leave()
    one.wait(Word.DONE, 5, "x")


@pytest.mark.parametrize("files", [True, False], ids=["pidfd", "no pidfd"])
def test_who_died_before_is_noticed(files: bool, shared: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(1, "not in this sandbox")

    if not files:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    one, other = teams(shared, 2, timeout_s=0.3)
    one.set(Word.DONE, 5)
    if not files:
        with pytest.raises(PeerTimeoutError):  # it lives
            one.wait(Word.DONE, 5, "x")
    other.arena.words(1).set(PROCESS, ended_process())
    with pytest.raises(PeerLostError, match="its process has ended"):
        one.wait(Word.DONE, 5, "x")


def test_the_dead_are_named_before_those_who_left_because_of_them(shared: Region) -> None:
    one, other, third = teams(shared, 3)
    one.set(Word.DONE, 5)
    other.leave()
    third.arena.words(2).set(PROCESS, ended_process())
    with pytest.raises(PeerLostError, match="lost worker/2 while waiting for x: its process has ended"):
        one.wait(Word.DONE, 5, "x")


SCRIPT = """
import sys
from zmqtrain.arena import Arena
from zmqtrain.host.team import Team, Word
team = Team(Arena.join(sys.argv[1], 1), (0, 1), 1, names=("worker/0", "worker/1"))
team.join()
print("joined", flush=True)
team.wait(Word.DONE, 7, "x")
"""


def test_who_is_killed_while_we_wait_is_noticed(shared: Region) -> None:
    one = Team(Arena(shared, 0), (0, 1), 0, names=("worker/0", "worker/1"))
    with subprocess.Popen([sys.executable, "-c", SCRIPT, shared.path], stdout=subprocess.PIPE, text=True) as other:
        one.join()
        assert other.stdout is not None
        assert other.stdout.readline() == "joined\n"
        killing = threading.Timer(0.01, lambda: os.kill(other.pid, signal.SIGKILL))
        killing.start()
        one.set(Word.DONE, 5)
        with pytest.raises(PeerLostError, match="lost worker/1 while waiting for x: its process has ended"):
            one.wait(Word.DONE, 5, "x")
        killing.join()
    one.leave()


def test_giving_up_ends_every_wait(shared: Region) -> None:
    one, _ = teams(shared, 2)
    why = PeerLostError("server/0", "gone")
    giving_up = threading.Timer(0.01, lambda: one.abort(why))
    giving_up.start()
    for _ in range(2):
        with pytest.raises(PeerLostError) as caught:
            one.wait(Word.DONE, 5, "x")
        assert caught.value is why
    giving_up.join()


def test_bad_places_in_a_team_are_refused(shared: Region) -> None:
    arena = Arena(shared, 0)
    with pytest.raises(ValueError, match="rank 1 of the team has slot 1, but this process has slot 0"):
        Team(arena, (0, 1), 1, names="ab")
    with pytest.raises(ValueError, match="at most"):
        Team(arena, (0, 1), 0, names="ab", number=MOST_TEAMS)
