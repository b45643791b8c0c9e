"""Which settings train something else, and which do not."""

from __future__ import annotations

import pytest

from zmqtrain.topology.changed import changed_settings
from zmqtrain.topology.load import parse_topology

OLD = """
[job]
oversubscribe = true
task = "a.py:task"
args = { lr = 0.05, widths = [8, 8] }
steps = 10
[compute]
groups = 2
[exchange]
kind = "averaging"
every = 2
averaging = { method = "elastic", alpha = 0.1 }
"""


def old(changes: str = "") -> str:
    before, _, after = changes.partition(" -> ")
    assert before in OLD
    return OLD.replace(before, after) if before else OLD


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("lr = 0.05 -> lr = 0.01", ["[job] args.lr = 0.01 (was 0.05)"]),
        ("[8, 8] -> [8, 9]", ["[job] args.widths = [8, 9] (was [8, 8])"]),
        ("lr = 0.05,  -> ", ["[job] args.lr = not set (was 0.05)"]),
        ("a.py -> b.py", ['[job] task = "b.py:task" (was "a.py:task")']),
        ("every = 2 -> every = 4", ["[exchange] every = 4 (was 2)"]),
        ("alpha = 0.1 -> alpha = 0.2", ["[exchange] averaging.alpha = 0.2 (was 0.1)"]),
        ("[exchange] -> [optimizer]\nclip_norm = 1\n[exchange]", ["[optimizer] clip_norm = 1.0 (was 0.0)"]),
        ("groups = 2 -> groups = 4", ["[compute] groups = 4 (was 2)"]),
    ],
)
def test_what_trains_something_else(change: str, expected: list[str]) -> None:
    assert changed_settings(parse_topology(old()), parse_topology(old(change))) == expected


@pytest.mark.parametrize(
    "change",
    [
        " -> ",
        "steps = 10 -> steps = 20",
        "steps = 10 -> steps = 10\ncheckpoint_every = 5\nname = 'other'",
        "groups = 2 -> groups = 2\nthreads = 1\nbucket_size = '1 MiB'",
        "[job] -> [[hosts]]\nname = 'h[1-2]'\naddress = '10.0.0.1'\nslots = 1\n[job]",
        "[exchange] -> [observe]\ntrace_steps = 0\n[exchange]",
    ],
)
def test_what_trains_the_same(change: str) -> None:
    assert changed_settings(parse_topology(old()), parse_topology(old(change))) == []
