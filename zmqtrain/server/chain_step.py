"""What the server of a shard does next for the chain of servers that have it. Pure.

Normally it sees to it that there is a backup, if the run keeps shards twice. If the shard is to move, the coordinator says in its
views which chain it is to become (`zmqtrain.membership.moves`), and the server of the shard goes there step by step, without a
moment in which fewer servers have the shard than before::

    (a, b) -> (c, d):   fill c -> (a, c)   hand over to c -> (c, a)   fill d -> (c, d)       the last step is done by c
    (a)    -> (c):      fill c -> (a, c)   hand over to c -> (c)                             without replicas
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zmqtrain.net.endpoint import PeerId


@dataclass(frozen=True, slots=True)
class Fill:
    """Give it a copy, and make it the backup, in place of the present one."""

    backup: PeerId


@dataclass(frozen=True, slots=True)
class HandOver:
    """The backup serves the shard from now on."""

    to: PeerId


@dataclass(frozen=True, slots=True)
class DoWithout:
    """The backup is none any more."""

    backup: PeerId


ChainStep: TypeAlias = Fill | HandOver | DoWithout


def chain_step(
    own: PeerId, backup: PeerId | None, goal: Sequence[PeerId] | None, others: Sequence[PeerId], *, copies: bool
) -> ChainStep | None:
    """The next step; ``None``: nothing is to be done.

    Args:
        own: the server of the shard.
        backup: the one that the coordinator knows of.
        goal: the chain that it is to become, if it is to move.
        others: those that can be its backup, the best one first.
        copies: whether the run keeps shards twice.
    """
    if goal is not None:
        head, *then = goal
        if head != own:
            return HandOver(head) if backup == head else Fill(head)
        if then:
            return None if backup == then[0] else Fill(then[0])
        return None if backup is None else DoWithout(backup)
    if backup is None and copies and others:
        return Fill(others[0])
    return None
