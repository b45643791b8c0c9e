"""The variables of a role's process."""

from __future__ import annotations

from typing import Any

from zmqtrain.launcher.forked import ForkedProcesses
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.environment import RoleEnvironment
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place

FILE = """
[job]
task = "task.py"
python_path = ["src"]
[[hosts]]
name = "one"
slots = 1
environment = { COLOUR = "red", PYTHONPATH = "/lib/one:/lib/two", OMP_NUM_THREADS = "7" }
[[hosts]]
name = "two"
slots = 1
"""


def variables_of(host: str) -> dict[str, str]:
    topology = parse_topology(FILE)
    placement = place(topology)
    forks: Any = None
    processes = ForkedProcesses(forks, RunDescription(topology, placement, ""), None)
    return processes.environ(placement.of_host(host)[0], RoleEnvironment("agent/x", "memory://coordinator", "secret"))


def test_a_hosts_variables_are_those_of_its_roles() -> None:
    found = variables_of("one")
    assert found["COLOUR"] == "red"
    assert found["ZMQTRAIN_PYTHON_PATH"] == "src:/lib/one:/lib/two"
    assert found["OMP_NUM_THREADS"] == "1"  # the share of the host's slots, which [compute] threads changes


def test_another_hosts_are_not() -> None:
    found = variables_of("two")
    assert "COLOUR" not in found
    assert found["ZMQTRAIN_PYTHON_PATH"] == "src"
