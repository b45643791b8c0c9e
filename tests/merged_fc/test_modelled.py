"""An FC server on modelled devices, simulated: times, bytes and staleness are what they must be."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.collectives.operations import sent_by_all_reduce
from zmqtrain.errors import UsageError
from zmqtrain.merged_fc.profile_phases import split_profile
from zmqtrain.run.faults import kill
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.load import parse_topology
from zmqtrain.train.device.profile import Profile, shipped

FILE = """
[job]
name = "merged"
steps = {steps}
[[hosts]]
name = "n[00-{last:02d}]"
address = "10.0.0.1"
slots = 1
[compute]
groups = {groups}
group_size = {size}
batch_size = {batch}
device = "modelled"
profile = "{profile}"
{compute}
[exchange]
kind = "model_server"
staleness = "{staleness}"
merged_fc = {merged}
{more}
[network]
bandwidth = "{bandwidth}"
latency = "{latency}"
[simulation]
payload = "{payload}"
"""


class Events(defaultdict[str, list[dict[str, Any]]]):
    """By kind."""

    def hear(self, peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            self[str(event.get("kind"))].append({"peer": peer, **event, **(event.get("values") or {})})


def profile_of(folder: Path, conv_s: float = 0.3, fc_s: float = 0.1) -> Path:
    """Times of one sample: a convolution, and one linear layer; forward a third of each."""
    layers = [
        {"name": "conv", "numel": 1000, "forward_s": conv_s / 3, "backward_s": conv_s * 2 / 3, "flops_forward": 10**6,
         "activation_numel": 500},
        {"name": "fc", "numel": 100_000, "forward_s": fc_s / 3, "backward_s": fc_s * 2 / 3, "flops_forward": 200_000,
         "activation_numel": 10},
    ]  # fmt: skip
    path = folder / "profile.json"
    path.write_text(json.dumps({"layers": layers, "batch_size": 1, "samples": 100_000}))
    return path


def run(profile: object, groups: int, size: int, batch: int, **fields: Any) -> tuple[Result, Events]:
    given = {
        "steps": 30, "staleness": "async", "merged": "true", "bandwidth": "1000 Gbit/s", "latency": "1 us", "payload": "phantom",
        "compute": "", "more": "", "hosts": groups * size + 1,
    }  # fmt: skip
    given |= fields
    text = FILE.format(profile=profile, groups=groups, size=size, batch=batch, last=given.pop("hosts") - 1, **given)
    events = Events(list)
    result = simulate(parse_topology(text), options=Options(on_report=events.hear))
    assert result.ending.status == "done", result.ending
    assert not result.broken, result.broken
    return result, events


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 8])
def test_the_step_is_that_of_the_queue(groups: int, tmp_path: Path) -> None:
    """HE(g) = max(t_fc, (t_conv + t_fc) / g), with t_conv = 3 t_fc (Hadjis et al., section 4)."""
    _, events = run(profile_of(tmp_path), groups, 1, 1, steps=60)
    (fc,) = events["fc"]
    assert fc["staleness"] == {"0": groups * 60}
    seconds = [event["seconds"] for event in events["step"] if event["step"] >= 20]
    expected = max(0.1, 0.4 / groups)
    assert sum(seconds) / len(seconds) / groups == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_convolutions_are_stale_by_the_other_groups_and_fully_connected_layers_not_at_all(groups: int, tmp_path: Path) -> None:
    noise = 'noise = { kind = "normal", spread = 0.1 }'
    _, events = run(profile_of(tmp_path), groups, 1, 1, steps=60, compute=noise)
    (server,), (fc,) = events["server"], events["fc"]
    assert fc["staleness_mean"] == 0
    assert server["staleness_mean"] == pytest.approx(groups - 1, abs=0.2)


@pytest.mark.parametrize(("size", "staleness"), [(1, "sync"), (2, "sync"), (4, "async")])
def test_the_whole_batch_of_a_group_is_one_turn(size: int, staleness: str, tmp_path: Path) -> None:
    """4 samples take the FC server 0.4 s, and each worker its part of 1.2 s."""
    _, events = run(profile_of(tmp_path), 1, size, 4, staleness=staleness, steps=5)
    for event in events["step"]:
        assert event["seconds"] == pytest.approx(1.2 / size + 0.4, rel=0.01)
        assert event["fc_wait_s"] == pytest.approx(0.4, rel=0.01)
        assert event["exposed_s"] == pytest.approx(0, abs=0.01)
        assert event["samples"] == 4 // size


def busy(events: Events, peer: str) -> list[tuple[float, float]]:
    """When the worker computes, from its trace: in its forwards and backwards, but for what it waits there."""
    spans = [event for event in events["span"] if event["peer"] == peer]
    waits = sorted((s["time"], s["time"] + s["seconds"]) for s in spans if s["category"] == "wait")
    found = []
    for span in spans:
        if span["name"] in ("forward", "backward"):
            start, end = span["time"], span["time"] + span["seconds"]
            for first, last in waits:
                if start <= first and last <= end:
                    found.append((start, first))
                    start = last
            found.append((start, end))
    return [(start, end) for start, end in found if end > start]


@pytest.mark.parametrize(("conv_s", "fc_s", "staleness"), [(0.3, 0.05, "async"), (0.2, 0.2, "async"), (0.3, 0.05, "sync")])
def test_groups_on_the_same_slots_compute_while_others_wait(conv_s: float, fc_s: float, staleness: str, tmp_path: Path) -> None:
    profile = profile_of(tmp_path, conv_s, fc_s)
    seconds = {}
    for groups in (1, 2):
        options = {"staleness": staleness, "steps": 12, "compute": f"pipeline = {groups}"}
        _, events = run(profile, groups, 2, 2, **options)
        steps = [event["seconds"] for event in events["step"] if event["step"] >= 4]
        seconds[groups] = sum(steps) / len(steps) / groups
    # A worker's part of a group's batch takes conv_s, and the FC server the whole of it 2 fc_s.
    assert seconds[1] == pytest.approx(conv_s + 2 * fc_s, rel=0.02)
    assert seconds[2] == pytest.approx(max(conv_s, 2 * fc_s), rel=0.02 if staleness == "async" else 0.5)
    assert seconds[2] < 0.9 * seconds[1]
    one, other = busy(events, "worker/0"), busy(events, "worker/2")
    assert len(one) > 10
    assert not [(a, b) for a in one for b in other if max(a[0], b[0]) < min(a[1], b[1]) - 1e-6], "both compute at once"


@pytest.mark.parametrize("servers", [2, 4])
def test_fc_servers_that_divide_the_layers_share_their_time(servers: int, tmp_path: Path) -> None:
    """On a fast network, t_fc / n. On a slow one what they send each other counts: the activations, and their gradients' sum."""
    _, events = run(profile_of(tmp_path), 1, 2, 2, more=f"fc_servers = {servers}", hosts=2 + servers, steps=6)
    for event in events["step"]:
        assert event["seconds"] == pytest.approx(0.3 + 0.2 / servers, rel=0.02)
        assert event["exposed_s"] == pytest.approx(0, abs=0.01)
    assert len(events["fc"]) == 1
    slow = {"bandwidth": "1 Mbit/s", "hosts": 2 + servers, "steps": 6}
    _, alone = run(profile_of(tmp_path), 1, 2, 2, **slow)
    _, several = run(profile_of(tmp_path), 1, 2, 2, more=f"fc_servers = {servers}", **slow)
    sent = [{event["peer"]: event["bytes_sent"] for event in each["traffic"]} for each in (alone, several)]
    activations = 6 * 2 * (500 * 4 + 8)  # and a target each
    summed = 6 * sent_by_all_reduce(2 * 500, 4, servers, 1)[1]
    assert sent[1]["fc/0"] - sent[0]["fc/0"] == pytest.approx(activations * (servers - 1) + summed, rel=0.1)
    assert sent[1]["fc/1"] == pytest.approx(summed, rel=0.1)
    assert sum(e["fc_wait_s"] for e in several["step"]) > sum(e["fc_wait_s"] for e in events["step"]) + 6 * 2 * 0.03


def test_fc_parameters_stay_off_the_wire(tmp_path: Path) -> None:
    sent = {}
    for merged in ("true", "false"):
        _, events = run(profile_of(tmp_path), 2, 2, 8, merged=merged, steps=10, staleness="sync")
        sent[merged] = sum(event["bytes_sent"] for event in events["traffic"])
    # A step of a group: 8 samples' activations and their gradients, against 100,000 parameters and their gradients.
    assert sent["true"] < 0.2 * sent["false"]


@pytest.mark.parametrize("staleness", ["sync", "async"])
def test_nothing_is_lost_or_doubled(staleness: str, tmp_path: Path) -> None:
    run(profile_of(tmp_path), 3, 2, 6, payload="small", staleness=staleness, steps=6)


def test_a_run_without_its_fc_server_ends(tmp_path: Path) -> None:
    given = {
        "staleness": "async",
        "merged": "true",
        "bandwidth": "1 Gbit/s",
        "latency": "1 us",
        "payload": "phantom",
        "compute": "",
        "more": "",
    }
    text = FILE.format(profile=profile_of(tmp_path), groups=2, size=2, batch=2, last=4, steps=100, **given)
    result = simulate(parse_topology(text), options=Options(faults=[kill("fc/0", at=3.0)]))
    assert result.ending.status == "failed"
    assert result.ending.error is not None
    assert "fc/0" in str(result.ending.error)
    assert not result.broken, result.broken


def test_alexnet_splits_behind_its_convolutions() -> None:
    first, second = split_profile(Profile.load("alexnet"))
    assert [layer.name for layer in second.layers] == ["fc6", "fc7", "fc8"]
    assert first.layers[-1].name == "pool5"
    assert first.update_s + second.update_s == pytest.approx(Profile.load("alexnet").update_s)
    assert second.numel > 20 * first.numel
    assert [layer.name for layer in split_profile(Profile.load("alexnet"), "fc8")[1].layers] == ["fc8"]


@pytest.mark.parametrize("name", shipped())
def test_shipped_profiles_split_or_say_why_not(name: str) -> None:
    profile = Profile.load(name)
    if name in ("lstm", "transformer"):
        with pytest.raises(UsageError, match=r"cannot be split in two phases.*name"):
            split_profile(profile)
        return
    first, second = split_profile(profile)
    assert [layer.name for layer in (*first.layers, *second.layers)] == [layer.name for layer in profile.layers]


def test_a_profile_without_activations_cannot_be_split(tmp_path: Path) -> None:
    path = profile_of(tmp_path)
    path.write_text(path.read_text().replace('"activation_numel": 500', '"activation_numel": 0'))
    with pytest.raises(UsageError, match="give it activation_numel"):
        split_profile(Profile.load(path))
