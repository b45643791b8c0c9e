"""How many workers there are where the file says nothing of groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqtrain.topology import schema
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Host, Topology


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had none."""
    monkeypatch.setattr(schema, "gpus", lambda: 0)


def job(hosts: str = "", compute: str = "", more: str = "") -> Topology:
    return parse_topology(f"[job]\n[compute]\n{compute}\n{hosts}\n{more}")


def hosts(*slots: int, devices: str = "") -> str:
    more = f"devices = {devices}\n" if devices else ""
    return "".join(f'[[hosts]]\nname = "h{number}"\nslots = {count}\n{more}' for number, count in enumerate(slots))


def shape(topology: Topology) -> tuple[int, int, str]:
    return topology.compute.groups, topology.compute.group_size, topology.exchange.kind


def test_the_first_example_for_clusters_trains_on_all_its_hosts() -> None:
    text = Path("docs/clusters.md").read_text().partition("```toml\n")[2].partition("```")[0]
    topology = parse_topology(text)
    placement = place(topology)
    assert [(role.host, role.threads, role.group, role.position) for role in placement.workers] == [
        (f"node0{number + 1}", 8, 0, number) for number in range(4)
    ]
    assert len(placement.roles) == 4
    assert shape(topology) == (1, 4, "allreduce")


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (job(), (1, 1, "allreduce")),
        (job(hosts(8)), (1, 1, "allreduce")),
        (job(hosts(8, 8)), (1, 2, "allreduce")),
        (job(hosts(8, 8, devices='["cuda:0", "cuda:1"]')), (1, 4, "allreduce")),
        (job(hosts(1, 1, devices='["cuda:0", "cuda:1"]')), (1, 2, "allreduce")),  # slots are the most there may be
        (job(hosts(8, 8, devices='["cuda:0", "cuda:1"]'), 'device = "cpu"'), (1, 2, "allreduce")),
        (job(hosts(8, 8), "groups = 2"), (2, 1, "model_server")),
        (job(hosts(8, 8), "groups = 1"), (1, 1, "allreduce")),
        (job(hosts(8, 8), "group_size = 1"), (1, 1, "allreduce")),
        (job(hosts(8, 8), "group_size = 3"), (1, 3, "allreduce")),
        (job(hosts(8, 8), 'groups = "auto"'), (1, 2, "allreduce")),
        (job(hosts(8, 8), more='[exchange]\nkind = "model_server"\n'), (1, 2, "model_server")),
        (job(hosts(8, 8), more='[exchange]\nmerged_fc = true\n'), (1, 2, "model_server")),
        (job(hosts(8, 8, 8), more='[exchange]\nkind = "gossip"\n'), (3, 1, "gossip")),
        (job(hosts(8, 8, 8), more='[exchange]\nkind = "averaging"\nevery = 4\n'), (3, 1, "averaging")),
        (job(hosts(8, 8, 8, 8), 'grid = "2x2"'), (1, 4, "allreduce")),
        (job(more='[engine]\nkind = "slurm"\n[engine.slurm]\nnodes = 3\n'), (1, 3, "allreduce")),
        (job(more='[engine]\nkind = "slurm"\n[engine.slurm]\nnodes = 3\ngpus = 2\n'), (1, 6, "allreduce")),
        (job(more='[engine]\nkind = "ray"\n[engine.ray]\nnodes = 2\ngpus = 4\n'), (1, 8, "allreduce")),
    ],
)  # fmt: skip
def test_a_worker_on_each_device_or_else_host(topology: Topology, expected: tuple[int, int, str]) -> None:
    assert shape(topology) == expected
    assert Topology.from_dict(topology.to_dict()) == topology
    placement = place(topology)
    if not topology.hosts_decide:
        return
    assert {role.host for role in placement.workers} == {host.name for host in topology.hosts}
    assert all(count <= 1 for count in _uses(placement.workers).values())


def _uses(workers: object) -> dict[object, int]:
    found: dict[object, int] = {}
    for role in workers:  # type: ignore[attr-defined]
        if role.device.startswith("cuda"):
            found[role.host, role.device] = found.get((role.host, role.device), 0) + 1
    return found


@pytest.mark.parametrize(
    ("topology", "parts"),
    [
        (job(hosts(8, 4, 2)), (8.0, 4.0, 2.0)),
        (job(hosts(8, 8)), "even"),
        (job(hosts(8, 4), 'parts = "even"'), "even"),
        (job(hosts(8, 4), "parts = [1, 1]"), (1.0, 1.0)),
        (job(hosts(8, 4), "threads = 2"), "even"),
        (job(hosts(8, 4), "group_size = 2"), "even"),
        (job(hosts(8, 4), 'grid = "2x1"'), "even"),
        (job(hosts(8, 4, devices='["cuda:0"]')), "even"),
        (job(hosts(8, 4, devices='["cuda:0"]'), 'device = "cpu"'), (8.0, 4.0)),
        (job(hosts(8, devices='["cuda:0"]') + '[[hosts]]\nname = "b"\nslots = 8\n'), "measured"),
        (job(hosts(8, 4), more='[data]\nshuffle = "ring"\n'), "even"),
        (job(hosts(8, 4), more='[exchange]\nkind = "gossip"\n'), "even"),
    ],
)
def test_unequal_hosts_share_a_batch_by_their_slots(topology: Topology, parts: object) -> None:
    assert topology.compute.parts == parts
    if isinstance(parts, tuple):
        assert [role.host for role in place(topology).workers] == [host.name for host in topology.hosts]


def test_gpus_of_this_machine_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "gpus", lambda: 4)
    assert shape(job(hosts(8))) == (1, 4, "allreduce")
    assert {role.device for role in place(job(hosts(8))).workers} == {"auto"}  # each takes the one of its number
    assert shape(job(hosts(2))) == (1, 2, "allreduce")
    assert shape(job(hosts(8), 'device = "cpu"')) == (1, 1, "allreduce")
    assert shape(job(hosts(8), "group_size = 1")) == (1, 1, "allreduce")
    assert shape(job('[[hosts]]\nname = "far"\naddress = "10.0.0.1"\nslots = 8\n')) == (1, 1, "allreduce")


def test_other_hosts_mean_other_workers_where_the_file_leaves_it_open() -> None:
    nodes = [Host(name=f"n{number}", slots=4) for number in range(3)]
    assert shape(job().with_hosts(nodes)) == (1, 3, "allreduce")
    assert job(hosts(8, 4)).with_hosts(nodes).compute.parts == "even"
    assert shape(job(compute="group_size = 2").with_hosts(nodes)) == (1, 2, "allreduce")
    settled = Topology.from_dict(job(hosts(8, 4)).to_dict())
    assert not settled.hosts_decide
    assert job(hosts(8, 4)).hosts_decide


def test_more_hosts_than_samples() -> None:
    with pytest.raises(Exception, match="does not mention groups, so all hosts form one group"):
        job('[[hosts]]\nname = "n[1-100]"\nslots = 1\n')
