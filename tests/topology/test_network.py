"""``[network]``, ``[compute] noise`` and ``[simulation]``: what they mean, how they are written back, and their faults."""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topology.faulty import only
from zmqtrain.errors import TopologyError
from zmqtrain.topology.faults import TopologyFaultsError
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.network import names_in
from zmqtrain.topology.schema import Network, Simulation, Topology
from zmqtrain.topology.toml_writer import write_toml

HOSTS = """\
[job]
[[hosts]]
name = "alpha"
[[hosts]]
name = "beta"
[[hosts]]
name = "n[1-8]"
"""
WORLD = (
    HOSTS
    + """\
[compute]
device = "modelled"
profile = "resnet50"
noise = { kind = "normal", spread = 0.2, straggler_chance = 0.01 }

[network]
bandwidth = "10 Gbit/s"
latency = "200 us"
jitter = "5 us"
loss = 0.001
dilation = 10

[[network.hosts]]
name = "n[1-4]"
bandwidth = "1 Gbit/s"
slowdown = 1.5

[[network.racks]]
name = "A"
hosts = ["alpha", "n[1-4]"]
uplink = "20 Gbit/s"
latency = "5 us"

[[network.racks]]
name = "B"
hosts = ["beta"]
uplink = "20 Gbit/s"

[[network.links]]
from = "alpha"
to = "*"
latency = "1 ms"

[[network.links]]
from = "n[1-2]"
to = "beta"
down = true

[simulation]
payload = "small"
time_limit = "2 h"

[[faults]]
at = "2 s"
kind = "kill"
target = "worker/0"

[[faults]]
step = 7
kind = "partition"
sides = [["alpha", "n[1-4]"], ["beta"]]
lasts = "1 s"
"""
)


def test_a_full_network() -> None:
    topology = parse_topology(WORLD)
    network = topology.network
    assert (network.bandwidth, network.latency, network.jitter) == (1e10, 2e-4, 5e-6)
    assert (network.loss, network.reconnect, network.local_bandwidth, network.local_latency) == (0.001, 0.05, 24e9, 50e-6)
    assert network.dilation == 10
    assert network.slowdowns() == {f"n{number}": 1.5 for number in range(1, 5)}
    assert [(rack.name, rack.hosts, rack.uplink, rack.latency) for rack in network.racks] == [
        ("A", ("alpha", "n[1-4]"), 2e10, 5e-6),
        ("B", ("beta",), 2e10, 0.0),
    ]
    first, second = network.links
    assert (first.source, first.target, first.latency, first.bandwidth, first.down) == ("alpha", "*", 1e-3, None, False)
    assert (second.source, second.target, second.latency, second.down) == ("n[1-2]", "beta", None, True)
    assert names_in(second.source, ()) == ("n1", "n2")
    assert names_in(first.target, ["alpha", "beta"]) == ("alpha", "beta")
    assert (topology.simulation.payload, topology.simulation.time_limit) == ("small", 7200.0)
    assert [(fault.at, fault.step, fault.kind) for fault in topology.faults] == [(2.0, None, "kill"), (None, 7, "partition")]
    assert topology.faults[1].sides == (("alpha", "n[1-4]"), ("beta",))
    noise = topology.compute.noise
    assert (noise.kind, noise.spread, noise.straggler_chance, noise.straggler_factor) == ("normal", 0.2, 0.01, 3.0)


def test_nothing_said_is_an_ideal_network() -> None:
    topology = parse_topology("[job]\n")
    assert topology.network == Network()
    assert (topology.network.bandwidth, topology.network.latency, topology.network.loss) == (None, None, 0.0)
    assert (topology.simulation, topology.faults) == (Simulation(), ())
    assert (topology.simulation.payload, topology.simulation.time_limit) == (None, 86_400.0)


def test_it_is_written_back_as_tables_with_the_file_s_own_keys() -> None:
    topology = parse_topology(WORLD)
    text = topology.to_toml()
    assert '[[network.links]]\nfrom = "alpha"\nto = "*"' in text
    assert "[[network.racks]]" in text
    assert '[[faults]]\nat = "2 s"\nkind = "kill"\ntarget = "worker/0"\n\n' in text  # nothing that a kill has no use for
    assert parse_topology(text) == topology
    assert Topology.from_dict(json.loads(json.dumps(topology.to_dict()))) == topology
    assert topology.to_dict()["network"]["links"][0]["from"] == "alpha"


def test_a_task_may_train_at_a_profile_s_pace() -> None:
    text = '[job]\ntask = "a:b"\n[compute]\ndevice = "modelled"\nprofile = "resnet50"\n[simulation]\npayload = "real"\n'
    assert parse_topology(text).simulation.payload == "real"


# Each case: what stands below `HOSTS`, which ends on line 7.
@pytest.mark.parametrize(
    ("text", "path", "line", "message"),
    [
        ("[network]\nbandwith = 1\n", "network.bandwith", 9, 'did you mean "bandwidth"'),
        (
            "[network]\nbandwidth = '-1 Gbit/s'\n",
            "network.bandwidth",
            9,
            "out of range: give a bandwidth from 1 kbit/s to 10000 Gbit/s",
        ),
        ("[network]\nbandwidth = '1 Zbit/s'\n", "network.bandwidth", 9, "unknown unit"),
        ("[network]\nlatency = '-1 ms'\n", "network.latency", 9, "out of range: give a time from 0 s to 10 s"),
        ("[network]\njitter = '1 min'\n", "network.jitter", 9, "out of range"),
        ("[network]\nloss = 0.6\n", "network.loss", 9, "must be less than or equal to 0.5"),
        ("[network]\nloss = -0.1\n", "network.loss", 9, "must be greater than or equal to 0"),
        ("[network]\nloss = nan\n", "network.loss", 9, "must be a finite number"),
        ("[network]\nreconnect = 'never'\n", "network.reconnect", 9, "is not a time"),
        ("[network]\ndilation = 0.5\n", "network.dilation", 9, "must be greater than or equal to 1"),
        ("[network]\ndilation = inf\n", "network.dilation", 9, "must be a finite number"),
        ("[[network.hosts]]\nbandwidth = '1 Gbit/s'\n", "network.hosts[0].name", 8, "is missing"),
        ("[[network.hosts]]\nname = 'alfa'\n", "network.hosts[0].name", 9, 'not a host of this file.*did you mean "alpha"'),
        ("[[network.hosts]]\nname = 'n[5-9]'\n", "network.hosts[0].name", 9, "n9 is not a host of this file"),
        ("[[network.hosts]]\nname = 'n[5-'\n", "network.hosts[0].name", 9, "is not a range"),
        ("[[network.hosts]]\nname = ''\n", "network.hosts[0].name", 9, "at least 1 character"),
        ("[[network.hosts]]\nname = 'n1'\nslowdown = 0\n", "network.hosts[0].slowdown", 10, "must be greater"),
        (
            "[[network.hosts]]\nname = 'n[1-2]'\n[[network.hosts]]\nname = 'n2'\n",
            "network.hosts[1].name",
            11,
            r"n2 is in network.hosts\[0\]",
        ),
        ("[[network.racks]]\nname = 'A'\nhosts = ['n1']\n", "network.racks[0].uplink", 8, "is missing"),
        ("[[network.racks]]\nname = 'A'\nhosts = []\nuplink = 1e9\n", "network.racks[0].hosts", 10, "at least 1 item"),
        ("[[network.racks]]\nname = 'A'\nhosts = 'n1'\nuplink = 1e9\n", "network.racks[0].hosts", 10, "must be an array"),
        ("[[network.racks]]\nname = 'A'\nhosts = ['n1', 3]\nuplink = 1e9\n", "network.racks[0].hosts[1]", 10, "must be a string"),
        (
            "[[network.racks]]\nname = 'A'\nuplink = 1e9\nhosts = [\n'n1',\n'bera']\n",
            "network.racks[0].hosts[1]",
            13,
            'mean "beta"',
        ),
        (
            "[[network.racks]]\nname = 'A'\nhosts = ['n1', 'n[1-2]']\nuplink = 1e9\n",
            "network.racks[0].hosts[1]",
            10,
            "twice in this rack",
        ),
        ("[[network.racks]]\nname = 'A'\nhosts = ['n1']\nuplink = '0 bit/s'\n", "network.racks[0].uplink", 11, "out of range"),
        ("[[network.links]]\nfrom = 'n1'\n", "network.links[0].to", 8, "is missing"),
        (
            "[[network.links]]\nfrom = 'n1'\nto = 'gamma'\n",
            "network.links[0].to",
            10,
            r"is not a host of this file \(alpha, beta, n1, n2, \.\.\.\)",
        ),
        ("[[network.links]]\nfrom = 'n[7-9]'\nto = '*'\n", "network.links[0].from", 9, "n9 is not a host"),
        ("[[network.links]]\nfrom = '*'\nto = '*'\n", "network.links[0]", 8, r"set these values in \[network\] itself"),
        ("[[network.links]]\nfrom = 'n1'\nto = 'n1'\n", "network.links[0].to", 10, "local_latency"),
        (
            "[[network.links]]\nfrom = 'n1'\nto = '*'\nsource = 'n1'\n",
            "network.links[0].source",
            11,
            r"unknown key \(known: from, to,",
        ),
        ("[[network.links]]\nfrom = 'n1'\nto = '*'\nloss = 1\n", "network.links[0].loss", 11, "less than or equal to 0.5"),
        ("[[network.links]]\nfrom = 'n1'\nto = '*'\ndown = 1\n", "network.links[0].down", 11, "true or false"),
        ("[network]\nlinks = 3\n", "network.links", 9, "must be an array"),
        ("[simulation]\npayload = 'phantoms'\n", "simulation.payload", 9, 'did you mean "phantom"'),
        ("[simulation]\npayload = 'small'\n", "simulation.payload", 9, 'is for modelled devices, but .compute. device is "auto"'),
        ("[simulation]\npayload = 'phantom'\n", "simulation.payload", 9, "or remove payload"),
        ("[simulation]\ntime_limit = '-1 s'\n", "simulation.time_limit", 9, "out of range"),
        ("[compute]\nnoise = { kind = 'gauss' }\n", "compute.noise.kind", 9, "must be one of constant, normal, exponential"),
        ("[compute]\nnoise = { spread = 0.5 }\n", "compute.noise.spread", 9, 'spread is for normal noise, but kind is "constant"'),
        ("[compute]\nnoise = { straggler_chance = 1.5 }\n", "compute.noise.straggler_chance", 9, "less than or equal to 1"),
        ("[compute]\nnoise = { straggler_factor = 0.5 }\n", "compute.noise.straggler_factor", 9, "greater than or equal to 1"),
        ("[compute]\nnoise = 'normal'\n", "compute.noise", 9, "must be a table"),
    ],
)
def test_a_fault_has_its_place_and_what_to_do(text: str, path: str, line: int, message: str) -> None:
    fault = only(HOSTS + text)
    assert (fault.path, fault.line) == (path, line), str(fault)
    assert re.search(message, str(fault)), str(fault)


def test_a_host_in_two_racks_and_two_racks_of_one_name() -> None:
    racks = "".join(f"[[network.racks]]\nname = 'A'\nhosts = ['n[{n}-3]']\nuplink = 1e9\n" for n in (1, 3))
    with pytest.raises(TopologyFaultsError) as caught:
        parse_topology(HOSTS + racks)
    assert [(fault.path, fault.line) for fault in caught.value.faults] == [
        ("network.racks[1].name", 13),
        ("network.racks[1].hosts[0]", 14),
    ]
    assert "n3 is in rack A already: a host can be in one rack only" in str(caught.value)


def test_unknown_hosts_are_not_told_where_the_hosts_themselves_are_unsound() -> None:
    assert only("[job]\n[[hosts]]\nname = 'a b'\n[[network.hosts]]\nname = 'alpha'\n").path == "hosts[0].name"


def test_thousands_of_faults_are_all_told() -> None:
    """And soon: what may have been meant is looked for in the first few only."""
    many = "".join(f"[[network.hosts]]\nname = 'm{number}'\n" for number in range(2000))
    with pytest.raises(TopologyFaultsError) as caught:
        parse_topology(f"[job]\n[compute]\ngroups = 1\n[[hosts]]\nname = 'n[1-4096]'\n{many}")
    assert len(caught.value.faults) == 2000
    assert caught.value.faults[-1].line == 5 + 2 * 2000


# Any file that loads is written back to an equal one; any other says what is wrong.

names = st.sampled_from(["alpha", "beta", "n1", "n8", "n[1-4]", "n[5-8]", "*", "gamma", "n[9"])
rates = st.sampled_from(["1 Gbit/s", "100 Mbit/s", 5e8, -1, "fast"])
times = st.sampled_from(["200 us", 0, 1e-3, "1 h"]) | st.floats(0, 10)
roles = st.sampled_from(["worker/0", "worker/1", "server/0", "alpha", "n3", "wroker/0"])


def table(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


networks = table(
    bandwidth=rates,
    latency=times,
    jitter=times,
    loss=st.floats(0, 0.5),
    dilation=st.floats(1, 1000),
    hosts=st.lists(table(name=names, bandwidth=rates, latency=times, slowdown=st.floats(0.001, 1000)), max_size=2),
    racks=st.lists(table(name=st.text(max_size=2), hosts=st.lists(names, max_size=2), uplink=rates, latency=times), max_size=2),
    links=st.lists(
        st.fixed_dictionaries({"from": names, "to": names}, optional={"latency": times, "down": st.booleans()}), max_size=2
    ),
)
faults = st.fixed_dictionaries(
    {"kind": st.sampled_from(["kill", "restart", "pause", "partition", "heal", "slow", "corrupt", "drop"])},
    optional={
        "at": times,
        "step": st.integers(0, 5),
        "target": roles,
        "to": roles,
        "sides": st.lists(st.lists(names, max_size=2), max_size=3),
        "one_way": st.booleans(),
        "factor": st.floats(0.5, 4),
        "lasts": times,
    },
)
simulations = table(payload=st.sampled_from(["phantom", "small", "real", "x"]), time_limit=times)


@given(networks, st.lists(faults, max_size=2), simulations, st.booleans())
def test_any_world_survives_writing_or_is_refused(
    network: dict[str, Any], schedule: list[dict[str, Any]], simulation: dict[str, Any], modelled: bool
) -> None:
    document = {**tomllib.loads(HOSTS), "network": network, "faults": schedule, "simulation": simulation}
    document["compute"] = {"groups": 2, "device": "modelled", "profile": "p.json"} if modelled else {"groups": 2}
    text = write_toml(document)
    assert tomllib.loads(text) == document
    with suppress(TopologyError):
        topology = parse_topology(text)
        assert parse_topology(topology.to_toml()) == topology
        assert Topology.from_dict(topology.to_dict()) == topology


PIECES = [
    "[",
    "]",
    "-",
    '"',
    "[[faults]]\n",
    "[[network.racks]]\n",
    "[network]\n",
    "*",
    "n[1-9]",
    "0",
    "\n",
    "=",
    "[3-1]",
    "at = 1\n",
]


@given(st.lists(st.tuples(st.integers(0, len(WORLD)), st.integers(0, 12), st.sampled_from(PIECES)), min_size=1, max_size=4))
def test_a_mutated_file_loads_or_raises_a_topology_error(cuts: list[tuple[int, int, str]]) -> None:
    text = WORLD
    for at, length, piece in cuts:
        text = text[:at] + piece + text[at + length :]
    with suppress(TopologyError):
        topology = parse_topology(text)
        assert parse_topology(topology.to_toml()) == topology
