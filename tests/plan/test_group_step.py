"""A group's step in this runtime: predicted, and simulated whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.plan.efficiency import FC_SERVER, PATH, efficiencies, efficiency
from zmqtrain.plan.fc_turn import FcTurn, MergedFc
from zmqtrain.plan.group_step import OurRuntime, loads_of, variants
from zmqtrain.plan.layers import Kind, LayerShape
from zmqtrain.plan.link import Link
from zmqtrain.plan.overlapped import BucketWay, LayerLoad, buckets_of, cycle_s
from zmqtrain.plan.profiled import profile_layers
from zmqtrain.plan.regroup import regrouped
from zmqtrain.plan.setup import link_of, source_of
from zmqtrain.plan.two_phases import split_of
from zmqtrain.plan.variation import Variation
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.profile import Profile


def topology_of(profile: str, *, hosts: int, slots: int = 1, groups: int = 1, **sections: Any) -> Topology:
    document: dict[str, Any] = {
        "job": {"steps": 16},
        "hosts": [{"name": f"h[1-{hosts}]", "slots": slots}],
        "compute": {"groups": groups, "group_size": 4 // groups, "batch_size": 128, "device": "modelled", "profile": profile},
        "exchange": {"kind": "model_server", "staleness": "async"},
        "network": {"bandwidth": "10 Gbit/s", "latency": "50 us"},
        "simulation": {"payload": "phantom"},
    }
    for name, values in sections.items():
        document[name] = document.get(name, {}) | values
    return Topology.from_dict(document)


def measured_s(topology: Topology) -> float:
    """Seconds an update, in the middle of a simulated run."""
    ends: list[float] = []
    options = Options(on_report=lambda _, batch: ends.extend(each["time"] for each in batch if each.get("kind") == "step"))
    result = simulate(topology, options=options)
    assert result.ending.status == "done"
    ends.sort()
    first, last = ends[len(ends) // 4], ends[3 * len(ends) // 4]
    steps = sum(first < each <= last for each in ends) / topology.compute.group_size
    return (last - first) / steps


#: 1.6 MB of parameters, 96 ms a batch on one worker.
EVEN = {
    "layers": [{"name": f"layer{n}", "numel": 50_000, "forward_s": 0.004, "backward_s": 0.008} for n in range(8)],
    "batch_size": 128,
}


@pytest.mark.parametrize(("network", "shards", "worst"), [("2 Gbit/s", 2, 0.03), ("100 Mbit/s", 1, 0.2)])
def test_predicted_beside_simulated(tmp_path: Path, network: str, shards: int, worst: float) -> None:
    """Workers on hosts of their own, and servers on others. Times vary a little, as they do: groups that begin together would
    otherwise send together for ever.

    Where the network counts as much as computing, groups get in each other's way before a NIC is full: by 12 to 18 % of an update,
    depending on the seed."""
    profile = tmp_path / "even.json"
    profile.write_text(json.dumps(EVEN))
    sections: dict[str, Any] = {
        "network": {"bandwidth": network, "latency": "20 us"},
        "exchange": {"shards": shards},
        "compute": {"noise": {"kind": "normal", "spread": 0.03}, "bucket_size": "256 KiB"},
    }
    errors = []
    for groups in (1, 2, 4):
        topology = topology_of(str(profile), hosts=4 + shards, groups=groups, **sections)
        loads = loads_of(source_of(topology).layers, flops_per_s=0.0, word_bytes=4)
        varies = Variation.of_noise(topology.compute.noise)
        predicted = efficiency(OurRuntime(topology, loads, _simulated(topology), variation=varies).step(groups))
        errors.append(abs(predicted.seconds / measured_s(topology) - 1))
    assert max(errors) < worst, errors
    assert errors[-1] < 0.08, errors


def _simulated(topology: Topology) -> Any:
    """Handing a message over takes no time in a simulation."""
    paper = topology.model_copy(update={"plan": topology.plan.model_copy(update={"pricing": "paper"})})
    return link_of(paper)


def test_the_servers_nic_limits_many_groups() -> None:
    model = variants(topology_of("alexnet", hosts=5), source_of(topology_of("alexnet", hosts=5)).layers)["as it is"]
    found = {each.groups: each for each in efficiencies(model)}
    nbytes = sum(load.nbytes for load in model.loads)
    assert found[4].bottleneck == "the servers' NICs"
    assert found[4].seconds == pytest.approx(
        nbytes * 8 / 10e9, rel=0.1
    )  # one model into the server an update, whatever the group's size
    assert found[1].bottleneck == PATH
    two = topology_of("alexnet", hosts=6, exchange={"shards": 2})
    halved = efficiency(OurRuntime(two, model.loads, model.link).step(4))
    stations = {station.name: station.seconds for station in halved.step.stations}
    assert stations["the servers' NICs"] == pytest.approx(found[4].seconds / 2)


def test_a_group_on_one_host_needs_no_network_inside() -> None:
    """Host accumulation: what its workers add up never leaves their host."""
    apart, together = (
        OurRuntime(topology, loads_of(source_of(topology).layers, flops_per_s=0.0, word_bytes=4), link_of(topology)).step(1)
        for topology in (topology_of("alexnet", hosts=5), topology_of("alexnet", hosts=2, slots=4))
    )
    assert together.path_s < apart.path_s
    nics = {each.name: each.seconds for each in apart.stations}
    assert nics["the workers' NICs"] > nics["the servers' NICs"]


def test_a_merged_fc_server_takes_its_bytes_off_the_wire() -> None:
    topology = topology_of("alexnet", hosts=5, network={"bandwidth": "1 Gbit/s"})
    models = variants(topology, source_of(topology).layers)
    assert list(models) == ["as it is", "merged", "pipelined"]
    for groups in (1, 2, 4):
        plain, merged, piped = (efficiency(model.step(groups)) for model in models.values())
        assert merged.seconds < plain.seconds / 2  # 58 of 62 million parameters
        assert piped.seconds <= merged.seconds
        assert piped.step.staleness == 2 * groups - 1
    slow = OurRuntime(topology, models["merged"].loads, link_of(topology), merged=MergedFc(models["merged"].merged.split, 9.0))  # type: ignore[union-attr]
    assert efficiency(slow.step(4)).bottleneck == FC_SERVER


def several(servers: int, groups: int, **sections: Any) -> Topology:
    exchange = {"merged_fc": True, "fc_servers": servers}
    return topology_of("alexnet", hosts=4 + servers, groups=groups, exchange=exchange, plan={"pricing": "paper"}, **sections)


@pytest.mark.parametrize(("servers", "groups"), [(1, 4), (2, 1), (2, 4), (4, 2)])
def test_fc_servers_that_divide_the_layers_beside_simulated_ones(servers: int, groups: int) -> None:
    """On a network where what they send each other counts for more than what they compute. Within 6 %: messages of a turn are taken
    to share NICs evenly with activations, however many there are of either."""
    network = {"bandwidth": "1 Gbit/s", "latency": "50 us"}
    topology = several(servers, groups, network=network, compute={"noise": {"kind": "normal", "spread": 0.03}})
    predicted = efficiency(variants(topology, source_of(topology).layers)["as it is"].step(groups))
    assert predicted.seconds == pytest.approx(measured_s(topology), rel=0.06)


@pytest.mark.parametrize(("groups", "size", "pipeline", "bandwidth"), [(4, 2, 2, "1 Gbit/s"), (3, 4, 3, "10 Gbit/s")])
def test_groups_that_take_turns_beside_simulated_ones(groups: int, size: int, pipeline: int, bandwidth: str) -> None:
    """NICs nearly full, and the slots always busy: then within 10 %, else within 5 %."""
    compute = {"groups": groups, "group_size": size, "pipeline": pipeline, "noise": {"kind": "normal", "spread": 0.03}}
    network = {"bandwidth": bandwidth, "latency": "50 us"}
    topology = topology_of(
        "alexnet", hosts=5, compute=compute, network=network, exchange={"merged_fc": True}, plan={"pricing": "paper"}
    )
    predicted = efficiency(variants(topology, source_of(topology).layers)["as it is"].step(groups // pipeline))
    assert predicted.seconds == pytest.approx(measured_s(topology), rel=0.1 if bandwidth == "1 Gbit/s" else 0.05)


def test_a_turn_of_several_fc_servers() -> None:
    """1,000 bytes come in, layers pass 400 to each other, and all of it takes 8 s to compute."""
    merged = MergedFc(0, 8.0, 1000.0, (400.0,), update_s=2.0)
    alone, two, four = (FcTurn.of(merged, place(several(servers, 1)), Link(0.1, 0.001)) for servers in (1, 2, 4))
    assert (alone.whole_s(Link(0.1, 0.001)), alone.nics) == (10.0, ())
    # Half of 400 bytes each way before the second layer and back, the activations' gradients by `doubling`: 1,000 to each other.
    assert (two.compute_s, two.update_s, two.tell_bytes, two.exchange_bytes) == (4.0, 1.0, 1000.0, 200 + 200 + 1000)
    assert two.latency_s == pytest.approx(0.4)
    assert two.whole_s(Link(0.1, 0.001)) == pytest.approx(1.0 + 1.4 + 0.4 + 4.0 + 1.0)
    assert set(two.nics) == {("h6", 2400.0), ("h5", 2400.0)}
    assert (four.compute_s, four.tell_bytes) == (2.0, 3000.0)
    one_host = Topology.from_dict(
        {"job": {}, "hosts": [{"name": "a", "slots": 1}, {"name": "b", "slots": 8}],
         "exchange": {"kind": "model_server", "merged_fc": True, "fc_servers": 2}}
    )  # fmt: skip
    local = FcTurn.of(merged, place(one_host), Link(0.1, 0.001))
    assert (local.tell_bytes, local.exchange_bytes, local.latency_s) == (0.0, 0.0, 0.0)


def layer(kind: Kind, outputs: tuple[int, ...], weights: int = 10) -> LayerShape:
    return LayerShape(kind, kind, (1,), outputs, weights)


@pytest.mark.parametrize(
    ("layers", "split"),
    [
        ([layer("conv", (4, 8, 8)), layer("pool", (4, 4, 4), 0), layer("linear", (10,)), layer("linear", (5,))], 2),
        ([layer("conv", (4, 8, 8)), layer("norm", (4,)), layer("conv", (4, 8, 8))], 3),
        ([layer("embedding", (7, 3)), layer("recurrent", (7, 3)), layer("linear", (3,))], 2),
        ([layer("linear", (10,)), layer("linear", (5,))], 0),
    ],
)
def test_where_the_fc_phase_begins(layers: list[LayerShape], split: int) -> None:
    assert split_of(layers) == split


def test_the_fc_phase_of_shipped_profiles() -> None:
    heads = {name: profile_layers(Profile.load(name), 1) for name in ("lenet", "alexnet", "vgg16", "resnet50")}
    assert {name: layers[split_of(layers)].name for name, layers in heads.items()} == {
        "lenet": "ip1", "alexnet": "fc6", "vgg16": "fc6", "resnet50": "fc"
    }  # fmt: skip


LOADS = [LayerLoad(str(number), 100.0, 1.0, 2.0) for number in range(4)]


@pytest.mark.parametrize(
    ("way", "overlap", "seconds"),
    [
        (BucketWay(), True, 12.0),
        # The first layer's bucket leaves when backward is through, and is waited for.
        (BucketWay(push_byte_s=0.01), True, 13.0),
        (BucketWay(push_byte_s=0.01, read_byte_s=0.01), True, 14.0),
        (BucketWay(push_byte_s=0.01, read_byte_s=0.01), False, 12.0 + 5.0),  # four one after another, two stages
        (BucketWay(latency_s=0.5), True, 12.5),
        (BucketWay(ring_byte_s=0.01, push_byte_s=0.01), True, 15.0),
        # Slower than computing. The last to come is the third layer's bucket: two forwards and a backward until one leaves again.
        (BucketWay(push_byte_s=0.1), True, 40.0 + 4.0),
    ],
    ids=["free", "push", "there and back", "no overlap", "latency", "ring twice", "slow network"],
)
def test_the_length_of_an_overlapped_step(way: BucketWay, overlap: bool, seconds: float) -> None:
    buckets = buckets_of(LOADS, 100)
    assert buckets == [[3], [2], [1], [0]]
    assert cycle_s(LOADS, way, buckets, overlap=overlap) == pytest.approx(seconds)


def test_buckets_take_what_fits() -> None:
    loads = [LayerLoad("a", 60, 1, 1), LayerLoad("pool", 0, 1, 1), LayerLoad("b", 50, 1, 1), LayerLoad("c", 40, 1, 1)]
    assert buckets_of(loads, 100) == [[3, 2], [0]]
    assert buckets_of(loads, 10) == [[3], [2], [0]]


def test_other_groups_of_the_same_workers() -> None:
    topology = topology_of("lenet", hosts=4)
    two = regrouped(topology, 2)
    assert (two.compute.groups, two.compute.group_size, two.compute.batch_size) == (2, 2, 128)
    assert two.exchange.staleness == "async"
    alone = regrouped(Topology.from_dict({"job": {}, "hosts": [{"name": "h", "slots": 4}], "compute": {"group_size": 4}}), 4)
    assert (alone.exchange.kind, alone.exchange.staleness) == ("model_server", "async")
    with pytest.raises(UsageError, match="4 workers cannot be divided into 3 equal groups"):
        regrouped(topology, 3)
    small = topology_of("lenet", hosts=4, compute={"batch_size": 2, "groups": 4, "group_size": 1})
    with pytest.raises(UsageError, match="as 1 groups: the batch is too small for the group"):
        regrouped(small, 1)
    loads = loads_of(source_of(small).layers, flops_per_s=0.0, word_bytes=4)
    assert OurRuntime(small, loads, link_of(small)).choices == [2, 4]


def measured_profile(folder: Path, **measured: Any) -> str:
    """Convolutions that take 10 ms and 1 ms a sample, and an FC phase of 2 ms a sample; and what else was measured."""
    sizes = [{"samples": n, "conv_s": 0.01 + 0.001 * n, "fc_s": 0.002 * n} for n in (16, 32, 64, 128)]
    conv = {"name": "conv", "numel": 1000, "flops_forward": 10**6, "activation_numel": 16, "forward_s": 0.046, "backward_s": 0.092}
    fc = {"name": "fc", "numel": 1000, "flops_forward": 2000, "activation_numel": 2, "forward_s": 0.1, "backward_s": 0.156}
    file = folder / "measured.json"
    document = {"layers": [conv, fc], "batch_size": 128, "measured": {"fc_from": "fc", "sizes": sizes, **measured}}
    file.write_text(json.dumps(document))
    return str(file)


def test_t_conv_of_k_is_what_was_measured_of_so_many_samples(tmp_path: Path) -> None:
    topology = topology_of(measured_profile(tmp_path), hosts=5, network={"bandwidth": "1 Tbit/s", "latency": "0 s"})
    models = variants(topology, source_of(topology).layers)
    for groups, samples in ((1, 32), (2, 64), (4, 128)):
        conv_s, fc_s = 0.01 + 0.001 * samples, 0.002 * samples
        assert models["as it is"].step(groups).compute_s == pytest.approx(conv_s + fc_s)
        merged = models["merged"].step(groups)
        assert merged.compute_s == pytest.approx(conv_s)
        assert {each.name: each.seconds for each in merged.stations}[FC_SERVER] == pytest.approx(0.256)


def test_the_file_may_have_a_merged_server_already(tmp_path: Path) -> None:
    merged_fc = {"merged_fc": True, "split": "fc"}
    topology = topology_of(measured_profile(tmp_path), hosts=5, exchange=merged_fc)
    models = variants(topology, source_of(topology).layers)
    assert list(models) == ["as it is", "unmerged", "pipelined"]
    assert models["as it is"].merged is not None
    assert models["unmerged"].merged is None
    assert all(each.seconds > 0 for model in models.values() for each in efficiencies(model))


def test_groups_that_take_turns_on_the_same_slots(tmp_path: Path) -> None:
    sections = {"exchange": {"merged_fc": True}, "compute": {"groups": 4, "group_size": 2, "pipeline": 2}}
    topology = topology_of(measured_profile(tmp_path), hosts=5, **sections)
    models = variants(topology, source_of(topology).layers)
    assert list(models) == ["as it is", "unmerged", "merged"]
    found = efficiency(models["as it is"].step(2))
    assert (found.step.depth, found.step.staleness, found.bottleneck) == (2, 3, FC_SERVER)


@pytest.mark.parametrize(
    ("parts", "slowness"), [("even", 2.0), ("measured", 4 / 3.5), ([2.0, 2.0, 2.0, 1.0], 8 / 7), ([1.0, 1.0, 1.0, 2.0], 3.2)]
)
def test_a_group_with_a_slow_host(tmp_path: Path, parts: Any, slowness: float) -> None:
    network = {"bandwidth": "1 Tbit/s", "latency": "0 s", "hosts": [{"name": "h4", "slowdown": 2.0}]}
    topology = topology_of(measured_profile(tmp_path), hosts=5, network=network, compute={"parts": parts})
    found = variants(topology, source_of(topology).layers)["as it is"]
    assert found.step(1).compute_s == pytest.approx(slowness * (0.042 + 0.064))
    # Groups of one wait for nobody: one of four is half as fast, so there are 3.5 times as many updates as one makes.
    assert efficiency(found.step(4)).seconds == pytest.approx((0.138 + 0.256) / 3.5, rel=0.02)


def test_printed_with_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from zmqtrain.cli.plan import run_plan

    file = tmp_path / "job.toml"
    file.write_text(topology_of("alexnet", hosts=5).to_toml())
    assert run_plan(file, json_lines=True) == 0
    rows = [row for row in map(json.loads, capsys.readouterr().out.splitlines()) if row["row"] == "groups"]
    # Groups are those that the file would name: twice as many where two take turns on the same slots.
    assert [(row["variant"], row["pipeline"], row["groups"], row["group_size"]) for row in rows] == [
        (name, pipeline, pipeline * sets, 4 // sets)
        for name, pipeline in (("as it is", 1), ("merged", 1), ("pipelined", 2))
        for sets in (1, 2, 4)
    ]
    for row in rows:
        assert row["group_step_s"] == pytest.approx(row["groups"] * row["update_s"])
        assert row["staleness"] == row["groups"] - 1
    assert sum(row["saturation"] for row in rows) == 3
    assert rows[2]["implicit_momentum"] == 0.75
    assert run_plan(file) == 0
    shown = capsys.readouterr().out
    assert "4 workers in groups, each with batches of 128: asynchronous, as the file has it" in shown
    assert "g*: more groups are not faster" in shown
    assert "the servers' NICs" in shown
    assert "4 slots, 2 groups on each that take turns (pipeline = 2), each with batches of 128: the same" in shown
