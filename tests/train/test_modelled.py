"""Modelled devices: times on a virtual clock, payloads of every kind, and small ones whose end is known beforehand."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.local_exchange import LocalExchange
from tests.train.world import ListRecorder, Run, run, topology_of
from zmqtrain.exchange.base import Bucket
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.memory import (
    LARGEST,
    NoMemory,
    SmallMemory,
    differences,
    exact,
    expected_parameters,
    gradient,
    wrong_pieces,
)
from zmqtrain.train.device.modelled import ModelledReplica, SpeedFactor
from zmqtrain.train.device.profile import Layer, Profile
from zmqtrain.wire.phantom import PhantomPayload

LAYERS = (
    Layer("conv1", 20, 0.002, 0.003),
    Layer("pool1", 0, 0.001, 0.001),
    Layer("conv2", 30, 0.004, 0.006),
    Layer("bias", 3, 0.0, 0.0),
    Layer("fc", 1000, 0.010, 0.020),
    Layer("softmax", 0, 0.001, 0.002),
)
FORWARD_S, BACKWARD_S = 0.018, 0.032


class NoExchange:
    """Gives buckets back after a while."""

    def __init__(self, replica: ModelledReplica, takes_s: float = 0.0) -> None:
        self.replica, self.takes_s = replica, takes_s
        self.handed_over: list[tuple[int, float]] = []
        replica.connect(self.bucket_ready)

    def bucket_ready(self, bucket: Bucket) -> None:
        loop = asyncio.get_running_loop()
        self.handed_over.append((bucket.index, round(loop.time(), 9)))
        loop.call_later(self.takes_s, self.replica.parameters_ready, bucket)


def replica_of(**settings: Any) -> ModelledReplica:
    profile = settings.pop("profile", Profile(LAYERS))
    return ModelledReplica(
        profile, **{"bucket_bytes": 100, "overlap": True, "timeout_s": 100.0, "recorder": ListRecorder(), **settings}
    )


def test_a_step_takes_the_time_of_its_layers_and_hands_over_when_they_are_done() -> None:
    async def main() -> None:
        replica = replica_of()
        exchange = NoExchange(replica)
        assert [bucket.names for bucket in replica.buckets] == [("fc",), ("bias",), ("conv2",), ("conv1",)]
        result = await replica.step(0, 8)
        assert (result.compute_s, result.exposed_s) == (pytest.approx(FORWARD_S + BACKWARD_S), 0.0)
        times = dict(exchange.handed_over)
        assert times[0] == pytest.approx(FORWARD_S + 0.022)
        assert times[len(times) - 1] == pytest.approx(FORWARD_S + BACKWARD_S)
        assert list(times) == sorted(times), "in the order of buckets"

    run_virtual(main())


def test_without_overlap_all_is_handed_over_at_the_end() -> None:
    async def main() -> None:
        replica = replica_of(overlap=False)
        exchange = NoExchange(replica)
        await replica.step(0, 8)
        assert {at for _, at in exchange.handed_over} == {round(FORWARD_S + BACKWARD_S, 9)}
        assert len(exchange.handed_over) == len(replica.buckets)

    run_virtual(main())


def test_what_the_forward_waits_for_is_exposed_and_not_computed() -> None:
    async def main() -> None:
        replica = replica_of()
        NoExchange(replica, takes_s=0.1)
        await replica.step(0, 8)
        result = await replica.step(1, 8)
        # The last bucket comes 0.1 s after the end of the backward; all others lie before it.
        assert result.exposed_s == pytest.approx(0.1)
        assert result.compute_s == pytest.approx(FORWARD_S + BACKWARD_S)

    run_virtual(main())


def test_noise_and_slowdown_make_steps_longer() -> None:
    slow = 1.0

    async def main() -> None:
        nonlocal slow
        profile = Profile(LAYERS, update_s=0.01, batch_size=4)
        speed_factor = SpeedFactor(lambda step: (1.0, 2.5)[step], lambda: slow)
        replica = replica_of(profile=profile, speed_factor=speed_factor)
        NoExchange(replica)
        whole = FORWARD_S + BACKWARD_S
        assert (await replica.step(0, 4)).compute_s == pytest.approx(whole)
        assert (await replica.step(1, 4)).compute_s == pytest.approx(2.5 * whole)
        assert (await replica.step(0, 6)).compute_s == pytest.approx(1.5 * whole)
        slow = 3.0
        assert (await replica.step(0, 4)).compute_s == pytest.approx(3 * whole)
        await replica.update()
        assert replica.update_s == pytest.approx(0.03)

    run_virtual(main())


def test_a_slowdown_counts_for_work_that_begins_later() -> None:
    slow = 1.0

    def slow_down() -> None:
        nonlocal slow
        slow = 10.0

    async def main() -> None:
        layers = tuple(Layer(f"l{index}", 100, 1.0, 1.0) for index in range(3))
        replica = replica_of(profile=Profile(layers), speed_factor=SpeedFactor(slowdown=lambda: slow))
        NoExchange(replica)
        asyncio.get_running_loop().call_later(4.5, slow_down)
        # The second layer of the backward runs already.
        assert (await replica.step(0, 1)).compute_s == pytest.approx(5 + 10)

    run_virtual(main())


def test_neighbouring_layers_without_a_bucket_between_are_one_sleep() -> None:
    layers = tuple(Layer(f"l{index}", 10, 1e-5, 1e-5) for index in range(100))
    replica = replica_of(profile=Profile(layers), bucket_bytes=1000)
    assert len(replica.buckets) == 4
    assert len(replica._forward) == len(replica._backward) == 4
    long = replica_of(profile=Profile(tuple(replace(layer, forward_s=1.0) for layer in layers)), bucket_bytes=1 << 20)
    assert len(long._forward) == 100, "a slowdown counts from the next layer on"


GRID: list[tuple[dict[str, Any], int, int]] = [
    ({"kind": "allreduce"}, 3, 2),
    ({"kind": "averaging", "every": 2}, 3, 1),
    ({"kind": "averaging", "every": 3}, 2, 2),
    ({"kind": "model_server", "staleness": "sync", "shards": 3}, 3, 2),
    ({"kind": "model_server", "staleness": "async", "shards": 2}, 3, 1),
    ({"kind": "model_server", "staleness": {"bound": 1}, "shards": 2}, 2, 3),
    ({"kind": "model_server", "staleness": "async", "snapshot": True, "shards": 2}, 3, 1),
    ({"kind": "model_server", "staleness": "sync", "compression": "bf16"}, 2, 1),
    ({"kind": "model_server", "staleness": "async", "compression": "fp16"}, 2, 3),
]
PROFILE = Profile(LAYERS, update_s=0.001, evaluate_s=0.01, samples=1000)


def topology_for(tmp_path: Path, exchange: dict[str, Any], groups: int, size: int, payload: str | None, **more: Any) -> Topology:
    layers = [
        {"name": each.name, "numel": each.numel, "forward_s": each.forward_s, "backward_s": each.backward_s} for each in LAYERS
    ]
    values = {"layers": layers, "update_s": 0.001, "evaluate_s": 0.01, "samples": 1000}
    (tmp_path / "profile.json").write_text(json.dumps(values))
    compute = {
        "groups": groups,
        "group_size": size,
        "batch_size": 12,
        "device": "modelled",
        "profile": str(tmp_path / "profile.json"),
        "bucket_size": 100,
        "noise": {"kind": "exponential"},
        **more.pop("compute", {}),
    }
    simulation = {} if payload is None else {"simulation": {"payload": payload}}
    return topology_of(job={"steps": 5, "seed": 3}, compute=compute, exchange=exchange, **simulation, **more)


def trained(topology: Topology) -> Run:
    result = run_virtual(run(topology, None))
    assert not result.errors
    return result


@pytest.mark.parametrize(("exchange", "groups", "size"), GRID)
def test_small_payloads_end_where_they_must(exchange: dict[str, Any], groups: int, size: int, tmp_path: Path) -> None:
    topology = topology_for(tmp_path, exchange, groups, size, "small")
    assert exact(topology)
    result = trained(topology)
    asynchronous = topology.exchange.kind == "model_server" and topology.exchange.policy != "sync"
    stated = [fact for peer in result.recorders for fact in result.recorders[peer].audited if fact["what"] == "values"]
    assert [fact["wrong"] for fact in stated] == ([] if asynchronous else [None] * groups * size)
    held = [fact["pieces"] for peer in result.recorders for fact in result.recorders[peer].audited if fact["what"] == "held"]
    assert len(held) == (topology.exchange.shards if topology.exchange.kind == "model_server" else 0)
    for pieces in held:
        assert pieces
        assert wrong_pieces(PROFILE, topology, 5, pieces) is None
        assert wrong_pieces(PROFILE, topology, 4, pieces) is not None
    spread = result.recorders["worker/0"].of("finish")[0]["replica_spread"]
    if topology.exchange.kind == "allreduce" or topology.exchange.policy == "sync":
        assert spread == 0.0


@pytest.mark.parametrize("payload", ["phantom", "real", None])
@pytest.mark.parametrize(("exchange", "groups", "size"), GRID)
def test_every_payload_trains_with_every_exchange(
    exchange: dict[str, Any], groups: int, size: int, payload: str | None, tmp_path: Path
) -> None:
    result = trained(topology_for(tmp_path, exchange, groups, size, payload))
    assert len(result.recorders[f"worker/{groups * size - 1}"].of("step")) == 5


@pytest.mark.parametrize(
    "more",
    [
        {"exchange": {"compression": "int8"}},
        {"exchange": {"compression": "topk", "compression_ratio": 0.1}},
        {"exchange": {"compression": "sign"}},
        {"optimizer": {"clip_norm": 1.0}},
        {"compute": {"overlap": False}},
    ],
    ids=str,
)
@pytest.mark.parametrize("staleness", ["sync", "async"])
def test_phantoms_are_compressed_and_clipped(more: dict[str, Any], staleness: str, tmp_path: Path) -> None:
    more = dict(more)
    exchange = {"kind": "model_server", "staleness": staleness, "shards": 2, **more.pop("exchange", {})}
    topology = topology_for(tmp_path, exchange, 2, 2, "phantom", **more)
    assert exact(topology) == ("compute" in more)
    trained(topology)


@pytest.mark.parametrize("compression", ["fp16", "int8", "sign", "topk"])
@pytest.mark.parametrize("payload", ["phantom", None])
def test_all_reduce_of_modelled_devices_is_compressed(compression: str, payload: str | None, tmp_path: Path) -> None:
    topology = topology_for(tmp_path, {"kind": "allreduce", "compression": compression}, 2, 2, payload)
    assert not exact(topology)
    trained(topology)


def test_a_run_repeats_exactly_and_another_seed_does_not(tmp_path: Path) -> None:
    topology = topology_for(tmp_path, {"kind": "model_server", "staleness": "async"}, 3, 1, "phantom")
    first, second = (trained(topology).recorders["worker/1"].of("step") for _ in range(2))
    assert first == second
    other = topology.model_copy(update={"job": topology.job.model_copy(update={"seed": 4})})
    assert trained(other).recorders["worker/1"].of("step") != first
    assert len({event["compute_s"] for event in first}) == 5, "noise"


def test_phantom_buckets_take_no_memory(tmp_path: Path) -> None:
    profile = Profile((Layer("huge", 10**12, 1.0, 1.0),))

    async def main() -> None:
        replica = replica_of(profile=profile, memory=NoMemory.phantom(profile.optimizer))
        (bucket,) = replica.buckets
        assert isinstance(bucket.parameters, PhantomPayload)
        assert bucket.parameters.nbytes == 4 * 10**12

    run_virtual(main())


def test_every_lost_or_doubled_gradient_shows() -> None:
    """Two gradients differ unless worker, step and layer are equal (up to the period of all elements together)."""
    seen = {tuple(gradient(rank, step, layer, 8)) for rank in range(20) for step in range(50) for layer in range(5)}
    assert len(seen) == 20 * 50 * 5
    assert min(map(min, seen)) == 1
    assert max(map(max, seen)) == LARGEST


@pytest.mark.parametrize(
    ("exchange", "applied"),
    [({"kind": "averaging", "every": 2}, 5), ({"kind": "allreduce"}, 5), ({"kind": "allreduce", "every": 2}, 4)],
)
def test_expected_parameters_are_the_sum_of_all_gradients(exchange: dict[str, Any], applied: int, tmp_path: Path) -> None:
    topology = topology_for(tmp_path, exchange, 2, 2, "small")
    expected = expected_parameters(PROFILE, topology, 5)
    assert list(expected) == ["conv1", "conv2", "bias", "fc"]
    assert {name: len(values) for name, values in expected.items()} == {"conv1": 8, "conv2": 8, "bias": 3, "fc": 8}
    total = -sum(gradient(rank, step, 2, 8) for rank in range(4) for step in range(applied))
    assert np.array_equal(expected["conv2"], total)


def test_differences_name_the_layer() -> None:
    good = {"a": np.array([1.0, 2.0]), "b": np.array([3.0])}
    assert differences(good, good) is None
    assert differences({"a": good["a"] + 1e-9}, good) is None
    assert differences({**good, "b": np.array([4.0])}, good) == "b holds [4.0] instead of [3.0]"
    assert differences({"b": np.array([np.nan])}, good) == "b holds [nan] instead of [3.0]"


def test_parameters_that_nobody_spread_show() -> None:
    memory = SmallMemory(PROFILE, rank=1, factor=1)
    plan = PROFILE.bucket_plans(100)[0]
    assert np.isnan(memory.payload(plan, parameters=True).numpy()).all()
    assert not np.isnan(memory.payload(plan, parameters=False).numpy()).any()


def test_a_replica_updates_itself() -> None:
    async def main() -> None:
        replica = replica_of(profile=PROFILE, memory=SmallMemory(PROFILE, 0, 1))
        exchange = LocalExchange()
        await exchange.start(replica)  # type: ignore[arg-type]
        replica.connect(exchange.bucket_ready)
        for step in range(2):
            exchange.begin_step(step)
            await replica.step(step, 4)
            await exchange.end_step()
        memory = SmallMemory(PROFILE, 0, 1)
        assert np.array_equal(memory.values(replica.buckets)["fc"], -gradient(0, 0, 4, 8) - gradient(0, 1, 4, 8))

    run_virtual(main())
