"""Ranges of hosts: what they become, and that faults are still about the file's own lines."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topology.faulty import only
from zmqtrain.topology.faults import TopologyFaultsError
from zmqtrain.topology.hosts import Host, gathered
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.schema import Topology


@pytest.mark.parametrize(
    ("entry", "hosts"),
    [
        ('name = "n[1-3]"', [("n1", "127.0.0.1"), ("n2", "127.0.0.1"), ("n3", "127.0.0.1")]),
        ('name = "n[09-10]"\naddress = "10.0.0.[9-10]"', [("n09", "10.0.0.9"), ("n10", "10.0.0.10")]),
        ('name = "n[1-2]"\naddress = "n[1-2].lan"', [("n1", "n1.lan"), ("n2", "n2.lan")]),
        ('name = "n[1-2]"\naddress = "cluster"', [("n1", "cluster"), ("n2", "cluster")]),
        ('name = "n[7-7]"', [("n7", "127.0.0.1")]),
        ('name = "n"\naddress = "10.0.0.[4-4]"', [("n", "10.0.0.4")]),
    ],
)
def test_a_range_is_as_many_hosts(entry: str, hosts: list[tuple[str, str]]) -> None:
    topology = parse_topology(f"[job]\n[[hosts]]\n{entry}\nslots = 2\ndevices = ['cuda:0']\n")
    assert [(host.name, host.address) for host in topology.hosts] == hosts
    assert {(host.slots, host.devices) for host in topology.hosts} == {(2, ("cuda:0",))}


def test_a_range_of_machines_to_log_in_to() -> None:
    entry = """
[job]
[engine]
kind = "ssh"
[[hosts]]
name = "n[1-2]"
address = "10.0.0.[1-2]"
slots = 1
bind = "10.1.0.[1-2]"
python = "~/env/bin/python"
environment = { OMP_PROC_BIND = "true" }
ssh = { host = "login[7-8]", user = "me" }
"""
    topology = parse_topology(entry)
    assert [(host.address, host.bind, host.listens_at, host.ssh.host) for host in topology.hosts] == [
        ("10.0.0.1", "10.1.0.1", "10.1.0.1", "login7"),
        ("10.0.0.2", "10.1.0.2", "10.1.0.2", "login8"),
    ]
    assert {(host.python, host.environment["OMP_PROC_BIND"], host.ssh.user) for host in topology.hosts} == {
        ("~/env/bin/python", "true", "me")
    }
    assert parse_topology(topology.to_toml()) == topology
    same = entry.replace("10.1.0.[1-2]", "0.0.0.0").replace("login[7-8]", "gate")
    assert 'name = "n[1-2]"' in parse_topology(same).to_toml()
    named = parse_topology(same.replace("10.0.0.[1-2]", "n[1-2].lan").replace('bind = "0.0.0.0"\n', ""))
    assert {host.listens_at for host in named.hosts} == {"::"}  # whatever the name means there


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('address = "127.0.0.1"', "is a loopback address, which"),
        ('bind = "127.0.0.[1-2]"', "is a loopback address, which"),
        ('bind = "eth0"', "is not an IP address"),
        ('bind = "10.0.0.[1-3]"', "3 addresses for 2 hosts"),
        ('ssh = { host = "a[1-3]" }', "3 addresses for 2 hosts"),
        ('ssh = { host = "-oProxyCommand=x" }', "must be one word"),
        ('ssh = { user = "a b" }', "must be one word"),
        ('ssh = { options = { RemoteCommand = "x" } }', "RemoteCommand, which cannot be set here"),
        ('ssh = { options = { "A=b" = "x" } }', "not an option of ssh"),
        ("environment = { ZMQTRAIN_TOKEN = 'x' }", "which zmqtrain sets itself"),
        ("environment = { 'A B' = 'x' }", "cannot be the name of an environment variable"),
        ('python = "-c"', "is not a path"),
    ],
)
def test_what_cannot_be_logged_in_to(line: str, message: str) -> None:
    address = "" if "address" in line else 'address = "10.0.0.[1-2]"\n'
    with pytest.raises(TopologyFaultsError, match=message):
        parse_topology(f'[job]\n[engine]\nkind = "ssh"\n[[hosts]]\nname = "n[1-2]"\nslots = 1\n{address}{line}\n')


def test_each_host_of_a_range_on_this_machine_has_its_processors() -> None:
    assert {host.slots for host in parse_topology("[job]\n[[hosts]]\nname = 'n[1-2]'\n").hosts} == {Host(name="n").slots}


# Each case: what stands below [job] and three hosts a, b1 and b2 (lines 2 to 5).
@pytest.mark.parametrize(
    ("text", "path", "line", "message"),
    [
        ("[[hosts]]\nname = 'n[1-2'\nslots = 1\n", "hosts[1].name", 7, "is not a range of names"),
        ("[[hosts]]\nname = 'n[2-1]'\nslots = 1\n", "hosts[1].name", 7, "runs backwards"),
        ("[[hosts]]\nname = 'n[1-2]'\naddress = 'x['\nslots = 1\n", "hosts[1].address", 8, "is not a range of names"),
        ("[[hosts]]\nname = 'n[1-3]'\naddress = 'x[1-2]'\nslots = 1\n", "hosts[1].address", 8, "2 addresses for 3 hosts"),
        ("[[hosts]]\nname = 'n'\naddress = 'x[1-2]'\nslots = 1\n", "hosts[1].address", 8, "2 addresses for 1 hosts"),
        ("[[hosts]]\nname = 'n[1-3]'\naddress = 'x'\n", "hosts[1].slots", 6, "slots is missing"),
        (
            "[[hosts]]\nname = 'b[2-3]'\nslots = 1\n",
            "hosts[1].name",
            7,
            "b2 is in hosts\\[0\\], too: give each host a name of its own",
        ),
        ("[[hosts]]\nname = 'b[1-2]'\nslots = 1\n", "hosts[1].name", 7, "hosts\\[0\\] has the same name"),
        ("[[hosts]]\nname = '[1-2]'\nslots = 1\n", "hosts[1].name", 7, "must be a name"),
        (f"[[hosts]]\nname = '{'n' * 60}[09999-10000]'\nslots = 1\n", "hosts[1].name", 7, "at most 64 characters"),
        ("[[hosts]]\nname = 'n[0-70000]'\nslots = 1\n", "hosts[1].name", 7, "70,001 names, but at most 65,536"),
        (
            "[[hosts]]\nname = 'n[1-65535]'\nslots = 1\n",
            "hosts[1].name",
            7,
            "up to this entry there are 65,537, but at most 65,536",
        ),
    ],
)
def test_a_fault_of_a_range_is_at_its_line(text: str, path: str, line: int, message: str) -> None:
    fault = only(f"[job]\n[[hosts]]\nname = 'b[1-2]'\naddress = 'b[1-2]'\nslots = 1\n{text}")
    assert (fault.path, fault.line) == (path, line)
    assert re.search(message, str(fault)), str(fault)


def test_many_long_ranges_are_refused_before_they_fill_the_memory() -> None:
    entries = "".join(f"[[hosts]]\nname = 'n{number}x[1-65536]'\nslots = 1\n" for number in range(500))
    assert only(f"[job]\n{entries}").path == "hosts[1].name"


def test_a_large_cluster_is_written_briefly() -> None:
    text = '[job]\n[[hosts]]\nname = "n[1-20000]"\naddress = "10.0.0.1"\nslots = 1\n[compute]\ngroups = 20000\n'
    topology = parse_topology(text)
    assert len(topology.hosts) == 20_000
    written = topology.to_toml()
    assert 'name = "n[1-20000]"' in written
    assert len(written) < 4000
    assert parse_topology(written).hosts == topology.hosts


numbered = st.builds("{}{}{}".format, st.sampled_from(["n", "m", "x0"]), st.integers(0, 12), st.sampled_from(["", ".lan"]))
padded = st.builds("{}{:02d}".format, st.sampled_from(["n", "m"]), st.integers(7, 12))
hosts = st.builds(
    Host, name=numbered | padded, address=numbered | padded | st.just("cluster"), slots=st.integers(1, 2), devices=st.just(())
)


@given(st.lists(hosts, max_size=12), st.booleans())
def test_gathered_hosts_expand_to_the_same(some: list[Host], in_order: bool) -> None:
    if in_order:
        some.sort(key=lambda host: (len(host.name), host.name))
    entries = gathered(some)
    assert [host for entry in entries for host in entry.expanded()] == some


@given(st.integers(0, 120), st.integers(1, 40), st.integers(0, 4), st.sampled_from(["10.0.0.[{}-{}]", "cluster"]))
def test_a_range_that_was_expanded_is_gathered_again(first: int, many: int, digits: int, address: str) -> None:
    end = first + many - 1
    if len(f"{first:0{digits}d}") != len(f"{end:0{digits}d}") and digits > len(str(first)):
        return
    entry = Host(name=f"n[{first:0{digits}d}-{end:0{digits}d}]", address=address.format(first, end), slots=1)
    assert len(gathered(entry.expanded())) == 1
    topology = Topology.from_dict({"job": {}, "hosts": [entry.model_dump()]})
    assert parse_topology(topology.to_toml()) == topology
