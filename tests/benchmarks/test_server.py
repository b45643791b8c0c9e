"""Once for real: processes, ZeroMQ, TCP. The benchmark checks the arithmetic itself."""

from __future__ import annotations

import sys

import pytest

from benchmarks.server import bench_server


def test_push_and_pull_between_processes(tmp_path) -> None:
    script = tmp_path / "peer.sh"
    script.write_text('[ "$2 $3" = "2 1" ] && echo "{\\"median_ms\\": 1000.0, \\"mode\\": \\"$4\\"}"\n')
    peer = {"mxnet_python": sys.executable, "mxnet_script": str(script)}
    (case,) = bench_server(**peer, model_bytes=10_000_000, rounds=4, policies=("sync",), exposed=False)
    assert set(case) == {"bench", "case", "value", "unit", "peer", "peer_value", "ratio"}
    assert (case["case"], case["unit"]) == ("push+pull 10 MB, 2 workers, 1 server, sync", "ms")
    assert (case["peer"], case["peer_value"]) == ("mxnet", 1000.0)
    assert case["ratio"] == pytest.approx(1000.0 / case["value"], rel=0.01)
