"""Which role runs where."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import PlacementError
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import Placement, place
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Timeouts


def topology_of(
    slots: list[int], groups: int = 1, size: int = 1, servers: int = 0, *, oversubscribe: bool = False, more: str = ""
) -> Topology:
    text = f"[job]\noversubscribe = {str(oversubscribe).lower()}\n"
    text += "".join(f'[[hosts]]\nname = "h{number}"\nslots = {count}\n' for number, count in enumerate(slots))
    text += f"[compute]\ngroups = {groups}\ngroup_size = {size}\nbatch_size = 4096\n{more}\n[exchange]\n"
    text += f'kind = "model_server"\nshards = {servers}\n' if servers else 'kind = "allreduce"\n'
    return parse_topology(text)


def hosts_of(placement: Placement) -> list[list[str]]:
    """The hosts of each group's workers."""
    return [[role.host for role in placement.workers if role.group == group] for group in range(placement.groups)]


def test_one_worker_takes_all_slots_as_threads() -> None:
    (role,) = place(topology_of([4])).roles
    assert (role.peer, role.host, role.local_rank, role.threads, role.device) == ("worker/0", "h0", 0, 4, "auto")
    assert (role.group, role.position) == (0, 0)


def test_groups_stay_together_and_spread_over_hosts() -> None:
    placement = place(topology_of([4, 4], groups=3, size=2, servers=3))
    assert hosts_of(placement) == [["h0", "h0"], ["h1", "h1"], ["h0", "h0"]]
    assert [role.local_rank for role in placement.workers] == [0, 1, 0, 1, 2, 3]
    assert [role.threads for role in placement.workers] == [1, 1, 2, 2, 1, 1]
    assert [(role.peer, role.host) for role in placement.server_roles] == [
        ("server/0", "h1"),
        ("server/1", "h0"),
        ("server/2", "h1"),
    ]
    assert placement.group_members(1) == ("worker/2", "worker/3")
    assert [role.peer for role in placement.of_host("h1")] == ["worker/2", "worker/3", "server/0", "server/2"]
    assert placement.role("server/1").index == 1


def test_the_fc_server_goes_where_slots_are_left_and_takes_them() -> None:
    file = '[job]\n[[hosts]]\nname = "a"\nslots = 6\n[[hosts]]\nname = "b"\nslots = 4\n[compute]\ngroups = 2\ngroup_size = 2\n'
    placement = place(parse_topology(file + "[exchange]\nmerged_fc = true\n"))
    assert hosts_of(placement) == [["a", "a"], ["b", "b"]]
    (role,) = placement.fc_roles
    assert (role.kind, role.peer, role.host, role.threads, role.device, role.group) == ("fc", "fc/0", "a", 4, "auto", -1)
    assert [role.peer for role in placement.server_roles] == ["server/0"]
    assert Placement.from_dict(json.loads(json.dumps(placement.to_dict()))) == placement
    assert place(topology_of([4])).fc_roles == ()


def test_the_fc_server_takes_the_device_behind_the_workers() -> None:
    file = '[job]\n[[hosts]]\nname = "a"\nslots = 1\ndevices = ["cuda:0", "cuda:1"]\n[exchange]\nmerged_fc = true\n'
    placement = place(parse_topology(file))
    assert [(role.peer, role.device, role.threads) for role in placement.roles] == [
        ("worker/0", "cuda:0", 1),
        ("server/0", "cpu", 1),
        ("fc/0", "cuda:1", 1),
    ]


def test_the_groups_of_a_pipeline_share_their_slots() -> None:
    hosts = '[[hosts]]\nname = "a"\nslots = 2\ndevices = ["cuda:0", "cuda:1"]\n[[hosts]]\nname = "b"\nslots = 2\n'
    compute = "[compute]\ngroups = 4\ngroup_size = 2\npipeline = 2\nthreads = 0\n"
    placement = place(parse_topology(f"[job]\n{hosts}{compute}[exchange]\nmerged_fc = true\n"))
    assert hosts_of(placement) == [["a", "a"], ["a", "a"], ["b", "b"], ["b", "b"]]
    assert [role.slot for role in placement.workers] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [role.local_rank for role in placement.workers] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [role.device for role in placement.workers] == ["cuda:0", "cuda:1"] * 2 + ["auto"] * 4
    assert {role.threads for role in placement.workers} == {1}
    with pytest.raises(PlacementError):
        place(parse_topology('[job]\n[[hosts]]\nname = "a"\nslots = 1\n' + compute + "[exchange]\nmerged_fc = true\n"))


def test_a_group_larger_than_any_host_takes_as_few_as_can_be() -> None:
    assert hosts_of(place(topology_of([4, 4, 4], groups=2, size=6))) == [["h0"] * 4 + ["h1"] * 2, ["h2"] * 4 + ["h1"] * 2]
    assert hosts_of(place(topology_of([4, 4, 4], groups=3, size=2))) == [["h0"] * 2, ["h1"] * 2, ["h2"] * 2]
    assert hosts_of(place(topology_of([5, 2], groups=2, size=3))) == [["h0"] * 3, ["h0", "h0", "h1"]]


def test_the_rows_of_a_grid_are_on_a_host_where_they_fit() -> None:
    """Rank r is in column r div Pr and row r mod Pr."""
    placement = place(topology_of([4, 4], size=8, more='grid = "2x4"\ndevice = "cpu"'))
    assert hosts_of(placement) == [["h0", "h1"] * 4]
    assert [(role.local_rank, role.slot) for role in placement.workers] == [(each, each) for each in range(4) for _ in range(2)]
    placement = place(topology_of([2] * 4, groups=2, size=4, more='grid = "2x2"'))
    assert hosts_of(placement) == [["h0", "h1"] * 2, ["h2", "h3"] * 2]
    assert hosts_of(place(topology_of([2, 2], size=4, more='grid = "4x1"'))) == [["h0", "h0", "h1", "h1"]]


def test_one_group_on_each_of_three_home_machines() -> None:
    placement = place(topology_of([8, 4, 2], groups=3))
    assert [(role.host, role.threads) for role in placement.workers] == [("h0", 8), ("h1", 4), ("h2", 2)]
    assert hosts_of(place(topology_of([2, 4, 8], groups=2))) == [["h1"], ["h2"]]
    more = Counter(role.host for role in place(topology_of([8, 4, 2], groups=7)).workers)
    assert more == {"h0": 4, "h1": 2, "h2": 1}


def test_a_group_is_spread_over_hosts_that_would_be_idle() -> None:
    assert hosts_of(place(topology_of([8, 8, 8, 8], size=4))) == [["h0", "h1", "h2", "h3"]]
    assert hosts_of(place(topology_of([8, 8, 8, 8], groups=2, size=2))) == [["h0", "h1"], ["h2", "h3"]]
    assert hosts_of(place(topology_of([8, 8, 8], groups=2, size=2))) == [["h0", "h0"], ["h1", "h2"]]
    # Together where there are as many groups as hosts.
    assert hosts_of(place(topology_of([8, 8], groups=2, size=2))) == [["h0", "h0"], ["h1", "h1"]]


def test_servers_have_hosts_without_workers_to_themselves() -> None:
    placement = place(topology_of([2, 4, 8], groups=1, servers=4))
    assert [role.host for role in placement.workers] == ["h2"]
    assert [role.host for role in placement.server_roles] == ["h1", "h0", "h2", "h1"]


def test_free_devices_come_first() -> None:
    text = '[job]\n[[hosts]]\nname = "a"\nslots = 16\ndevices = ["cuda:0", "cuda:1", "cuda:2"]\n'
    text += '[[hosts]]\nname = "b"\nslots = 16\ndevices = ["cuda:0"]\n[[hosts]]\nname = "c"\nslots = 64\n[compute]\ngroups = '
    devices = [(role.host, role.device) for role in place(parse_topology(text + "4\n")).workers]
    assert devices == [("a", "cuda:0"), ("a", "cuda:1"), ("a", "cuda:2"), ("b", "cuda:0")]
    assert Counter(role.host for role in place(parse_topology(text + "5\n")).workers) == {"a": 3, "b": 1, "c": 1}
    on_cpus = parse_topology(text + '4\ndevice = "cpu"\n')
    assert Counter(role.host for role in place(on_cpus).workers) == {"a": 1, "b": 1, "c": 2}


def test_more_workers_than_slots() -> None:
    with pytest.raises(PlacementError) as caught:
        place(topology_of([2, 1], groups=2, size=2))
    message = str(caught.value)
    assert "4 workers (2 groups of 2) do not fit into 3 slots (h0 has 2, h1 has 1)" in message
    for way_out in ("raise slots", "add [[hosts]]", "lower [compute] groups", "oversubscribe = true"):
        assert way_out in message


def test_oversubscribed_hosts_share_by_their_slots() -> None:
    placement = place(topology_of([2, 1], groups=6, oversubscribe=True))
    assert Counter(role.host for role in placement.workers) == {"h0": 4, "h1": 2}
    assert {role.threads for role in placement.workers} == {1}


@pytest.mark.parametrize(
    ("more", "devices"),
    [
        ('device = "cpu"', ["cpu", "cpu", "cpu"]),
        ('device = "cuda"', ["cuda:0", "cuda:1", "cuda:2"]),
        ('device = "modelled"\nprofile = "p.json"', ["modelled"] * 3),
        ("", ["auto", "auto", "auto"]),
    ],
)
def test_devices_of_a_host_without_any(more: str, devices: list[str]) -> None:
    assert [role.device for role in place(topology_of([4], groups=3, more=more)).workers] == devices


def test_devices_are_taken_in_turn() -> None:
    topology = parse_topology('[job]\n[[hosts]]\nname = "a"\nslots = 4\ndevices = ["cuda:1", "cuda:3"]\n[compute]\ngroups = 3\n')
    placement = place(topology)
    assert [role.device for role in placement.workers] == ["cuda:1", "cuda:3", "cuda:1"]
    assert [role.device for role in placement.server_roles] == ["cpu"]


def test_threads_that_the_file_sets() -> None:
    assert place(topology_of([8], groups=2, more="threads = 3")).workers[1].threads == 3


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 4), st.booleans())
def test_any_placement(slots: list[int], groups: int, size: int, servers: int, oversubscribe: bool) -> None:
    topology = topology_of(slots, groups, size, servers, oversubscribe=oversubscribe)
    if groups * size > sum(slots) and not oversubscribe:
        with pytest.raises(PlacementError):
            place(topology)
        return
    placement = place(topology)
    assert place(topology) == placement
    assert Placement.from_dict(json.loads(json.dumps(placement.to_dict()))) == placement
    assert [role.index for role in placement.workers] == list(range(groups * size))
    assert [role.index for role in placement.server_roles] == list(range(servers))
    assert len({role.peer for role in placement.roles}) == len(placement.roles)
    times = -(-groups * size // sum(slots))
    for number, count in enumerate(slots):
        here = placement.of_host(f"h{number}")
        workers = [role for role in here if role.kind == "worker"]
        assert len(workers) <= count * times
        assert sum(role.threads for role in workers) <= max(count, len(workers))
        for kind in ("worker", "server"):
            assert [role.local_rank for role in here if role.kind == kind] == list(range(sum(role.kind == kind for role in here)))
    if groups >= len(slots):
        whole = sum(len(set(hosts)) == 1 for hosts in hosts_of(placement))
        assert whole == min(groups, sum(count * times // size for count in slots))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 7))
def test_workers_are_spread_evenly_by_slots(slots: list[int], groups: int, size: int) -> None:
    """No host has none while another has two, and none could give a worker to one where it would have more slots."""
    if size > 1 and groups >= len(slots):
        groups = 1  # groups that stay together are spread as wholes
    here = Counter(role.host for role in place(topology_of(slots, groups, size, oversubscribe=True)).workers)
    counts = [here[f"h{number}"] for number in range(len(slots))]
    times = -(-groups * size // sum(slots))
    if size > 1 and len(slots) == 1:
        return
    if groups * size >= len(slots):
        assert 0 not in counts
    for count, share in zip(counts, slots, strict=True):
        for other, more in zip(counts, slots, strict=True):
            if count > 1 and other < more * times:
                assert share / count >= more / (other + 1)


@pytest.mark.parametrize("size", [1, 16])
def test_thousands_of_hosts(size: int) -> None:
    """Each role and host is looked up: what takes a moment if none of it looks through all others."""
    hosts = {"name": "n[0001-4096]", "slots": 1}
    compute = {"groups": 4096 // size, "group_size": size}
    exchange = {"kind": "model_server", "shards": 4096}
    placement = place(Topology.from_dict({"job": {}, "hosts": [hosts], "compute": compute, "exchange": exchange}))
    assert [role.host for role in placement.workers] == list(placement.hosts)
    for number, host in enumerate(placement.hosts):
        here = placement.of_host(host)
        assert here == (placement.role(f"worker/{number}"), placement.role(f"server/{4095 - number}"))
    members = [peer for group in range(placement.groups) for peer in placement.group_members(group)]
    assert members == [f"worker/{number}" for number in range(4096)]
    with pytest.raises(KeyError):
        placement.role("worker/4096")
    assert placement.of_host("n5000") == ()


def test_an_error_names_a_few_hosts_only() -> None:
    with pytest.raises(PlacementError, match="h7 has 1, and 12 more hosts"):
        place(topology_of([1] * 20, groups=30))


def test_the_timeouts_rise() -> None:
    for timeout_s in (0.1, 1.0, 60.0, 3600.0):
        rows = Timeouts.of(timeout_s).rows()
        seconds = {row.name: row.seconds for row in rows}
        assert all(row.purpose for row in rows)
        assert seconds["heartbeat"] * 4 <= seconds["lost"] < seconds["request"] < seconds["join"] < seconds["barrier"]
        assert seconds["flush"] <= seconds["grace"] <= seconds["lost"]
