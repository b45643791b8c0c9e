"""In which order the test files run, so that processors have something to do until the end."""

from __future__ import annotations

import os
from collections.abc import Iterable

#: Where the long tests are, which start processes or train. They run first: with several workers of xdist the short ones then fill
#: the end, and no worker is left alone with a long one.
LONG_FIRST = (
    "test_apart.py",
    "test_tutorials.py",
    "examples",
    "cli",
    "experiment",
    "embed",
    "train",
    "simulate",
    "parallel",
    "server",
)
#: Of the long ones, those that mostly wait for the processes they start. They are dealt out among the others, which compute: if all
#: workers of xdist had them at once, a processor would be idle, and later all would compute at once.
WAITING = ("integrations", "launcher", "resume")


def in_order(files: Iterable[str]) -> list[str]:
    """The test files in the order in which they run: long ones first, and those that wait dealt out evenly among them.

    Args:
        files: relative to the folder of the tests, in pytest's order, which is kept where nothing else is said.
    """
    kinds = {**dict.fromkeys(LONG_FIRST, "computing"), **dict.fromkeys(WAITING, "waiting")}
    ranks = {name: rank for rank, name in enumerate((*LONG_FIRST, *WAITING))}
    found: dict[str, list[str]] = {"computing": [], "waiting": [], "short": []}
    for file in files:
        found[kinds.get(file.split(os.sep)[0], "short")].append(file)
    dealt = []
    for kind in ("waiting", "computing"):
        long = sorted(found[kind], key=lambda file: ranks[file.split(os.sep)[0]])
        dealt += [(number / len(long), file) for number, file in enumerate(long)]
    return [file for _, file in sorted(dealt, key=lambda each: each[0])] + found["short"]
