"""What ``python -m benchmarks cluster`` does before and after it measures; the measuring itself takes minutes."""

from __future__ import annotations

import pytest
import torch

from benchmarks import cluster
from benchmarks.cluster import EXCHANGES, LEFT_OUT, Ran, bench_cluster
from benchmarks.ddp import _Layer
from benchmarks.run import run_bench
from zmqtrain.errors import UsageError
from zmqtrain.testing import machines
from zmqtrain.topology.load import parse_topology
from zmqtrain.train.device.profile import Layer


def test_what_it_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="no part 'lunch'; there are launch, links, ddp, accuracy"):
        list(bench_cluster(["lunch"]))
    with pytest.raises(UsageError, match="benchmark net has no --part"):
        run_bench("net", parts=["launch"])
    monkeypatch.setattr(machines.os, "geteuid", lambda: 1000)
    assert list(bench_cluster()) == []
    assert "left out: only root may make network namespaces" in capsys.readouterr().err


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_jobs_that_it_launches_are_jobs(name: str) -> None:
    shape, exchange, share = EXCHANGES[name]
    job = {"steps": 3, "job": "", "encryption": "disabled", "engine": "local", "sync": ""}
    text = cluster._JOB.format(**job, compute=cluster._modelled("vgg16", shape), exchange=exchange)
    topology = parse_topology(text + '[[hosts]]\nname = "m[1-4]"\nslots = 1\n')
    assert topology.compute.groups * topology.compute.group_size == cluster.HOSTS
    assert topology.compute.groups * topology.compute.batch_size == 32 * cluster.HOSTS
    assert 1 <= share < 2


def test_the_first_steps_do_not_count() -> None:
    ran = Ran(9.0, {0: [*[50.0] * LEFT_OUT, 1.0, 3.0], 1: [*[60.0] * LEFT_OUT, 2.0, 4.0]}, {})
    assert ran.step_s() == 2.5


def test_the_peer_s_layers_have_gradients_of_their_size() -> None:
    layer = _Layer(Layer("fc", 12, 0.0, 0.0), 1.0)
    value = torch.zeros(1, requires_grad=True)
    layer(value).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (12,)
