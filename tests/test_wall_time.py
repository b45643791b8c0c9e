"""Roles run in simulated worlds, too: nothing of theirs may read a real clock, sleep for real, or be random by itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "zmqtrain"

#: What only the real world has, by module. `zmqtrain.world` and the loop stand between it and all else.
REAL = {
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep", "process_time"},
    "datetime": {"*"},
    "secrets": {"*"},
    "uuid": {"*"},
    "random": {"SystemRandom", "random", "randint", "uniform", "choice", "shuffle", "getrandbits", "expovariate", "gauss"},
    "os": {"urandom", "getrandom"},
}
#: Modules that are never part of a simulated role, or hand the real world to those that are; and why.
MAY = {
    "world.py": "is where roles get the calendar and identity from",
    "net/loop.py": "makes the real clock",
    "train/device/threads.py": "is a part of real devices",
    "plan/measure/": "measures this machine",
    "cli/": "is for people, who live in real time",
    "launcher/asked.py": "waits in a command for another process's answer, without a loop",
    "launcher/detached.py": "waits for a real process, without a loop",
    "launcher/ssh/supervisor.py": "is part of a program of its own, on a real machine",
    "launcher/run.py": "starts real processes, and makes the secret that they share",
    "observe/sinks/": "waits in the launcher's threads for other people's libraries",
    "observe/dashboard/": "serves pages to people's browsers",
    "data/processes.py": "waits in a thread for real processes, which load data",
    "host/": "waits in threads, for processes of one real host",
    "c10d/": "is a part of torch.distributed, which lives in real time",
    "integrations/torchft.py": "is called by torchft, in real time",
    "embed/": "joins a program of the person's own, in real time",
}


def test_roles_take_time_and_chance_from_their_world() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not any(str(path.relative_to(PACKAGE)).startswith(prefix) for prefix in MAY)
        for line, what in _found(path)
    ]
    assert not found, "use the loop's time(), zmqtrain.world or a seeded generator:\n" + "\n".join(found)


def test_the_list_of_exceptions_is_true() -> None:
    for prefix in MAY:
        files = [PACKAGE / prefix] if prefix.endswith(".py") else list((PACKAGE / prefix).rglob("*.py"))
        assert any(_found(path) for path in files), f"{prefix} needs no exception any more"


def test_the_check_sees_what_it_looks_for() -> None:
    imports = "import time as t\nfrom secrets import token_hex\nimport random\n"
    source = imports + "t.sleep(1)\ntoken_hex()\nrandom.random()\nrandom.Random(3)\n"
    assert [what for _, what in _uses(ast.parse(source))] == ["secrets.token_hex", "time.sleep", "random.random"]


def _found(path: Path) -> list[tuple[int, str]]:
    """What a file uses of the real world. Most import nothing that could be: they need not be parsed."""
    text = path.read_text()
    return (
        list(_uses(ast.parse(text))) if re.search(rf"\bimport\b.*\b({'|'.join(REAL)})\b|\bfrom ({'|'.join(REAL)})\b", text) else []
    )


def _uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each use of what only the real world has."""
    names = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in REAL
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in REAL:
            for alias in node.names:
                if alias.name in REAL[node.module] or "*" in REAL[node.module]:
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            module = names[node.value.id]
            if node.attr in REAL[module] or "*" in REAL[module]:
                yield node.lineno, f"{module}.{node.attr}"
