"""Modelled devices that train: the arithmetic is the CPU's, and steps take no less than the profile says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.world import Recipe, Run, run, topology_of
from zmqtrain.train.device.paced import PacedTorch

#: Of `tests.train.world.network_of`.
LAYERS = (("0", 49, 0.002, 0.004), ("2", 72, 0.001, 0.002), ("4", 30, 0.001, 0.002))
FIELDS = ("name", "numel", "forward_s", "backward_s")
STEP_S = sum(forward_s + backward_s for _, _, forward_s, backward_s in LAYERS)


async def trained(compute: dict[str, Any], **exchange: Any) -> tuple[Run, Recipe]:
    job = {"task": "given:task", "steps": 4, "eval_every": 4}
    hosts = [{"name": "h[1-4]", "slots": 1}]
    compute = {"groups": 2, "batch_size": 12, **compute}
    exchange = {"kind": "model_server", "staleness": "sync", **exchange}
    topology = topology_of(job=job, hosts=hosts, compute=compute, exchange=exchange, simulation={"payload": "real"})
    recipe = Recipe()
    result = await run(topology, recipe)
    assert not result.errors
    return result, recipe


@pytest.mark.parametrize("exchange", [{}, {"merged_fc": True, "split": "2"}], ids=["workers", "merged"])
async def test_it_trains_as_the_cpu_does_and_takes_its_time(exchange: dict[str, Any], tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"layers": [dict(zip(FIELDS, layer, strict=True)) for layer in LAYERS]}))
    expected, _ = await trained({}, **exchange)
    result, _ = await trained({"device": "modelled", "profile": str(profile)}, **exchange)
    for peer in ("worker/0", "worker/1"):
        assert result.losses(peer) == pytest.approx(expected.losses(peer), rel=1e-9)
        for event in result.recorders[peer].of("step"):
            assert event["seconds"] >= STEP_S
    assert result.recorders["worker/0"].of("eval")[-1]["eval_loss"] == pytest.approx(
        expected.recorders["worker/0"].of("eval")[-1]["eval_loss"]
    )


async def test_waiting_is_no_computing() -> None:
    """What is charged after a wait begins when the wait has ended; arithmetic before it was late, and made up for."""

    class Steps(PacedTorch):
        def __init__(self) -> None:
            self.now, self._until, self.slept = 0.0, 0.0, []
            self.clock = lambda: self.now

        def sleep(self, seconds: float) -> None:
            self.slept.append(round(seconds, 6))
            self.now += max(0.0, seconds)

    device = Steps()
    device.spend(1.0)
    device.now += 0.6  # arithmetic
    device.spend(0.5)  # was late
    device.spend(0.3)
    assert device.slept == [1.0, -0.1, 0.2]

    def others() -> bool:
        device.now += 2.0
        return False

    condition = device.condition()
    with condition:
        assert not condition.wait_for(others, timeout=0.0)
        device.spend(0.5)
    assert device.slept[-1] == 0.5
