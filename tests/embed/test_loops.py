"""The table of docs/sessions.md: every loop, with every exchange, is one process's training, or refused by an error that says why.

Groups that do not average their gradients in each step (gossip, averaging) have the same samples here, so that there is one process
to compare them with; asynchronous servers have one group. What the exchanges make of groups that differ is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.embed.loops import ALLREDUCE, ASYNC, AVERAGING, GOSSIP, KINDS, ROWS, SYNC, Loop, Row, table
from tests.embed.world import run_sessions, topology_of
from zmqtrain.embed.session import Session
from zmqtrain.errors import TaskError, UsageError

EXCHANGES: dict[str, dict[str, Any]] = {
    ALLREDUCE: {"kind": "allreduce"},
    SYNC: {"kind": "model_server", "staleness": "sync", "shards": 2},
    ASYNC: {"kind": "model_server", "staleness": "async", "shards": 2},
    GOSSIP: {"kind": "gossip"},
    AVERAGING: {"kind": "averaging", "every": 2},
}


#: Groups and their sizes. A loop that every exchange trains has two groups of two workers with some exchanges only; it has groups
#: of two, and two groups, with one in step and with one that is not. What is refused may depend on both.
SHAPES = {
    ALLREDUCE: [(2, 2), (1, 2), (2, 1)],
    SYNC: [(2, 2), (1, 2), (2, 1)],
    ASYNC: [(1, 2)],
    GOSSIP: [(2, 2), (2, 1)],
    AVERAGING: [(2, 2), (2, 1)],
}


def shape_of(each: Row, kind: str) -> tuple[int, int]:
    return SHAPES[kind][0 if each.refused else (ROWS.index(each) + KINDS.index(kind)) % len(SHAPES[kind])]


def parameters(loop: Loop) -> Tensor:
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in loop.model.parameters()])


@cache
def in_one_process(name: str, places: tuple[int, ...]) -> tuple[Tensor, list[float]]:
    each = next(each for each in ROWS if each.name == name)
    loop = Loop(None, list(places), each.dtype)
    each.run(loop)
    return parameters(loop), loop.seen


def in_sessions(each: Row, kind: str) -> list[tuple[Tensor, list[float]]]:
    loops: dict[int, Loop] = {}

    def program(session: Session) -> None:
        in_step = kind in (ALLREDUCE, SYNC)
        place = session.rank if in_step else session.position
        loops[session.rank] = loop = Loop(session, [place], each.dtype)
        each.run(loop)

    groups, size = shape_of(each, kind)
    # Two buckets a model: each more is as many messages again.
    compute = {"groups": groups, "group_size": size, "bucket_size": 64 * each.dtype.itemsize}
    run_sessions(topology_of(compute=compute, exchange=EXCHANGES[kind]), program)
    return [(parameters(loop), loop.seen) for _, loop in sorted(loops.items())]


def cells() -> Iterator[Any]:
    """The loops with their exchanges. What all of these refuse in the same words, all-reduce and one of the others do, by turns."""
    for number, each in enumerate(ROWS):
        alike = len(each.refused) == len(KINDS) and len(set(each.refused.values())) == 1
        for kind in (ALLREDUCE, KINDS[1 + number % (len(KINDS) - 1)]) if alike else KINDS:
            yield pytest.param(each, kind, id=f"{each.run.__name__}-{kind}")


@pytest.mark.filterwarnings("ignore")  # torch has opinions about some of these loops
@pytest.mark.parametrize(("each", "kind"), list(cells()))
def test_a_loop_is_one_process_or_refused(each: Row, kind: str) -> None:
    if kind in each.refused:
        with pytest.raises((TaskError, UsageError), match=each.refused[kind]):
            in_sessions(each, kind)
        return
    groups, size = shape_of(each, kind)
    expected, seen = in_one_process(each.name, tuple(range(groups * size if kind in (ALLREDUCE, SYNC) else size)))
    for ours, ours_seen in in_sessions(each, kind):
        torch.testing.assert_close(ours, expected, rtol=each.tolerance, atol=each.tolerance)
        assert ours_seen == pytest.approx(seen, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", [SYNC, GOSSIP, AVERAGING])
def test_groups_of_one_worker_do_not_wait_for_a_loop_that_has_ended(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such runs go on without workers that are lost; one whose loop has ended is not lost."""
    monkeypatch.setitem(SHAPES, kind, [(2, 1)])
    each = next(each for each in ROWS if each.run.__name__ == "lengths")
    with pytest.raises(TaskError, match=each.refused[kind]):
        in_sessions(each, kind)


def test_the_table_is_in_the_documentation() -> None:
    page = Path(__file__).parents[2] / "docs" / "sessions.md"
    assert table() in page.read_text(), "python -m tests.embed.loops prints the table as it is to stand in docs/sessions.md"
