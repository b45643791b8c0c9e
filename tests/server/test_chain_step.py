"""How a shard's chain of servers becomes another one, step by step."""

from __future__ import annotations

import pytest

from zmqtrain.server.chain_step import ChainStep, DoWithout, Fill, HandOver, chain_step


@pytest.mark.parametrize(
    ("backup", "goal", "step"),
    [
        (None, None, Fill("x")),  # a run that keeps shards twice
        ("b", None, None),
        ("b", ("a", "b"), None),
        ("b", ("a", "c"), Fill("c")),
        ("b", ("b", "a"), HandOver("b")),
        ("b", ("c", "d"), Fill("c")),
        ("c", ("c", "d"), HandOver("c")),
        ("b", ("a",), DoWithout("b")),
        (None, ("a",), None),
        (None, ("c",), Fill("c")),
    ],
)
def test_the_server_of_a_shard_goes_towards_its_goal(
    backup: str | None, goal: tuple[str, ...] | None, step: ChainStep | None
) -> None:
    assert chain_step("a", backup, goal, ["x", "y"], copies=True) == step


def test_without_replicas_there_is_a_backup_only_on_the_way() -> None:
    assert chain_step("a", None, None, ["x"], copies=False) is None
    assert chain_step("a", None, ("x",), ["x"], copies=False) == Fill("x")
    assert chain_step("a", "x", ("x",), ["x"], copies=False) == HandOver("x")
