"""The benchmarks of encryption, small: that they measure, not how much."""

from __future__ import annotations

import pytest

from benchmarks.encrypted import bench_encrypted
from benchmarks.flood import bench_flood
from benchmarks.run import run_bench
from tests.launcher.ready import warm
from zmqtrain.errors import UsageError


def test_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)  # namespaces have their own tests
    goodput, trip = bench_encrypted(tensor_bytes=1_000_000, tensors=2, rounds=1, trips=3, flood=lambda: iter(()))
    assert goodput["case"] == "goodput over loopback, encrypted"
    assert goodput["ratio"] == pytest.approx(goodput["value"] / goodput["peer_value"])
    assert trip["ratio"] == pytest.approx(trip["peer_value"] / trip["value"])


def test_strangers_fail_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with warm() as started:
        for name, place in started.variables.items():
            monkeypatch.setenv(name, place)
        attempts, *speeds = bench_flood(rate=200, phase_s=1.0, phases=1)
    assert attempts["value"] > 100
    assert [speed["peer"] for speed in speeds] == ["while they are at another's door", "left in peace"]
    for speed in speeds:
        assert speed["value"] > 0
        assert speed["ratio"] == pytest.approx(speed["value"] / speed["peer_value"])


def test_only_the_network_is_encrypted() -> None:
    with pytest.raises(UsageError, match="benchmark server has no --encrypted"):
        run_bench("server", encrypted=True)
