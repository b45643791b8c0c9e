"""The table of docs/sessions.md: which loop trains with which exchange, and which is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.embed.loops.loop import Loop

#: Kinds of exchange, as the table's columns have them.
ALLREDUCE, SYNC, ASYNC, GOSSIP, AVERAGING = KINDS = ("allreduce", "servers, sync", "servers, async", "gossip", "averaging")
SERVERS = (SYNC, ASYNC)


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    run: Callable[[Loop], Any]
    refused: dict[str, str] = field(default_factory=dict)
    """By exchange: the beginning of a pattern that the error has."""
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12


ROWS: list[Row] = []


def row(name: str, *, refused: str | None = None, by: tuple[str, ...] = KINDS, **fields: Any) -> Callable[[Any], Any]:
    """Add the function to the table. ``refused`` by the exchanges ``by``, with an error that matches."""

    def add(run: Callable[[Loop], Any]) -> Callable[[Loop], Any]:
        ROWS.append(Row(name, run, dict.fromkeys(by, refused) if refused else {}, **fields))
        return run

    return add


def table() -> str:
    """The rows as docs/sessions.md has them. ``python -m tests.embed.loops`` prints them."""
    marks = {True: "refused", False: "="}
    lines = [f"| loop | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|"]
    lines += [f"| {each.name} | {' | '.join(marks[kind in each.refused] for kind in KINDS)} |" for each in ROWS]
    return "\n".join(lines)
