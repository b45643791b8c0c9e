"""What a look at hosts means: each fault with its host and what to do, and nothing said of hosts that are well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zmqtrain.cli.check_tables import machine_cells, machine_row
from zmqtrain.errors import HostFault
from zmqtrain.launcher.check.file import Finding
from zmqtrain.launcher.check.hosts import findings_of
from zmqtrain.launcher.host_facts import facts_here
from zmqtrain.launcher.preflight import HostReport, PreflightReport, WayReport
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place

GIB = 2**30
TOPOLOGY = parse_topology(
    """
[job]
[engine]
kind = "ssh"
[compute]
group_size = 4
[[hosts]]
name = "a"
address = "10.0.0.1"
slots = 2
[[hosts]]
name = "b"
address = "bee"
slots = 2
"""
)
FACTS: dict[str, Any] = {
    "packages": {"numpy": "2.1", "torch": "2.5.0+cu121"},
    "run_folder": ["/state", 50 * GIB],
    "scratch_folder": ["/tmp", 50 * GIB],
    "shm_bytes": GIB,
    "shared_memory_missing": None,
    "memory_bytes": 8 * GIB,
    "names": {"10.0.0.1": ["10.0.0.1"], "bee": ["10.0.0.2"]},
    "paths": {"/data": True},
}
OURS = {"numpy": "2.1", "torch": "2.5.0+cpu", "msgpack": "1.1"}


def look_of(facts: dict[str, Any] | None = None, offset_s: float = 0.001, **more: Any) -> PreflightReport:
    """Both hosts are well, but for what is given of the first."""
    hosts = [HostReport("a", {**FACTS, **(facts or {})}, offset_s, 0.002), HostReport("b", FACTS, 0.0, 0.001)]
    ways = [WayReport("a", "b", "", 9.4e8, 3e-4), WayReport("b", "a", "", 9.3e8, 4e-4)]
    return replace(PreflightReport(hosts, ways, encrypted=True), **more)


def findings(look: PreflightReport, model_bytes: int = 0) -> list[Finding]:
    return list(findings_of(TOPOLOGY, place(TOPOLOGY), look, OURS, model_bytes))


def test_gpus_that_the_file_does_not_name() -> None:
    (found,) = [each for each in findings(look_of({"gpus": 8})) if each.warning]
    assert (found.host, found.detail) == ("a", "6 of its 8 GPUs would be idle: each of its 2 workers uses one")
    assert 'devices = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"' in found.remedy
    assert not [each for each in findings(look_of({"gpus": 2})) if each.warning]


def test_gpus_that_are_not_seen() -> None:
    topology = TOPOLOGY.model_copy(update={"compute": TOPOLOGY.compute.model_copy(update={"device": "cuda"})})
    look = look_of({"gpus": 2})
    found = [each for each in findings_of(topology, place(topology), look, OURS, 0) if each.warning]
    assert [(each.host, each.ok) for each in found] == [("b", True)]
    assert "no NVIDIA device that can be seen" in found[0].detail


def test_hosts_that_are_well() -> None:
    found = findings(look_of(), GIB)
    assert all(finding.ok and not finding.remedy for finding in found)
    assert {finding.name: finding.detail for finding in found} == {
        "ways": "every host reaches the others (2 links): keys were exchanged, everything is encrypted",
        "clocks": "the clock that differs most (a) is 1 ms from the one here, ± 2 ms",
        "network": "930 Mbit/s or more on each link, round trips of 400 us at most",
    }


@pytest.mark.parametrize(
    ("facts", "what", "remedy"),
    [
        ({"names": {"bee": []}}, "cannot resolve bee", "address"),
        ({"names": {"bee": ["127.0.1.1"]}}, "resolves bee to 127.0.1.1, its own loopback address", "/etc/hosts"),
        ({"names": {"bee": ["::1"]}}, "resolves bee to ::1, its own loopback address", "/etc/hosts"),
        ({"run_folder": ["/state", 2**20]}, "only 1 MiB free in /state, but a run may write 64 MiB", "XDG_STATE_HOME"),
        ({"scratch_folder": ["/tmp", 2**20]}, "only 1 MiB free in /tmp", "TMPDIR"),
        ({"memory_bytes": GIB}, "1 GiB of memory free, but the model's copies in 2 roles need 6 GiB", "fewer slots"),
        ({"paths": {"/data": False}}, "no /data", "--data"),
    ],
)
def test_what_keeps_a_host_from_taking_part(facts: dict[str, Any], what: str, remedy: str) -> None:
    (fault,) = (finding for finding in findings(look_of(facts), GIB) if not finding.ok)
    assert (fault.host, fault.detail.startswith(what)) == ("a", True), fault
    assert remedy in fault.remedy


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"shm_bytes": 64 * 2**20}, "/dev/shm has 64 MiB"),
        ({"shared_memory_missing": "no futex"}, "no futex: its 2 workers"),
        ({"packages": {"numpy": "1.26"}}, "numpy 1.26, but this machine has 2.1"),
    ],
)
def test_what_is_only_worth_a_word(facts: dict[str, Any], what: str) -> None:
    (note,) = (finding for finding in findings(look_of(facts)) if finding.remedy)
    assert (note.ok, note.host, note.detail.startswith(what)) == (True, "a", True), note


def test_clocks() -> None:
    (fault,) = (finding for finding in findings(look_of(offset_s=-90.0)) if not finding.ok)
    assert (fault.host, fault.name) == ("a", "clocks")
    assert fault.detail.startswith("its clock is 90 s behind the one here")
    assert "timedatectl" in fault.remedy
    assert not [finding for finding in findings(look_of(offset_s=1.001)) if not finding.ok]  # may be a way's doing


def test_ways() -> None:
    none = look_of(ways=[WayReport("a", "b", "no answer within 10 s"), WayReport("b", "a", "", 9e8, 3e-4)])
    (fault,) = (finding for finding in findings(none) if not finding.ok)
    assert (fault.host, fault.detail) == ("a", "cannot reach b at bee (no answer within 10 s)")
    assert "ports" in fault.remedy
    slow = look_of(
        ways=[WayReport("a", "b", "", 9e8, 3e-4), WayReport("b", "a", "", 9e8, 3e-4), WayReport("b", "c", "", 9e7, 3e-4)]
    )
    (note,) = (finding for finding in findings(slow) if finding.remedy)
    assert (note.ok, note.host, note.detail) == (True, "b", "its link to c carries 90 Mbit/s, but most links carry 900 Mbit/s")


def test_hosts_that_could_not_be_looked_at() -> None:
    found = findings(PreflightReport(faults=[HostFault("b", "cannot log in", "see that ssh works")]))
    assert found == [Finding("hosts", False, "cannot log in", "see that ssh works", "b")]


def test_what_hosts_tell_of_themselves() -> None:
    facts = facts_here(["127.0.0.1", "no-such-name.invalid"], ["numpy", "no_such_package"], ["/", "/no/such/path"])
    assert facts["names"] == {"127.0.0.1": ["127.0.0.1"], "no-such-name.invalid": []}
    assert facts["packages"]["no_such_package"] is None
    assert facts["paths"] == {"/": True, "/no/such/path": False}
    assert facts["run_folder"][1] > 0
    cells = machine_cells(machine_row(HostReport("a", facts, -3e-6, 2e-4)))
    assert (cells["host"], cells["clock"]) == ("a", "-3 us ± 200 us")


@pytest.mark.parametrize(("staleness", "needed"), [("async", "10 GiB"), ("sync", "8 GiB")])
def test_servers_that_look_ahead_need_more_memory(staleness: str, needed: str) -> None:
    text = f"""
[job]
[compute]
groups = 2
[[hosts]]
name = "a"
slots = 2
[exchange]
kind = "model_server"
staleness = "{staleness}"
"""
    topology = parse_topology(text)
    look = PreflightReport([HostReport("a", {**FACTS, "memory_bytes": GIB}, 0.0, 0.001)], [], encrypted=True)
    found = [each.detail for each in findings_of(topology, place(topology), look, OURS, GIB) if not each.ok]
    assert [detail for detail in found if f"copies in 3 roles need {needed}" in detail], found
