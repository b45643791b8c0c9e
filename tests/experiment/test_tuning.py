"""What is decided once for all trials of a search."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqtrain.cli.tune_tables import Shown
from zmqtrain.experiment.tuning import with_compression
from zmqtrain.topology.schema import Topology


@pytest.mark.parametrize(
    ("bandwidth", "kind", "expected"),
    [("100 Mbit/s", "model_server", "int8"), ("100 Gbit/s", "model_server", "none"), ("100 Mbit/s", "allreduce", "auto")],
)
def test_all_trials_compress_alike(
    bandwidth: str, kind: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trials of a file with all-reduce use model servers without compression, so there is nothing to decide."""
    exchange = {"kind": kind, "compression": "auto"} | ({"shards": 4, "staleness": "async"} if kind == "model_server" else {})
    topology = Topology.model_validate(
        {
            "job": {},
            "hosts": [{"name": f"h{number}", "address": "10.0.0.1", "slots": 1} for number in range(4)],
            "compute": {"groups": "auto", "group_size": 4, "batch_size": 128, "device": "modelled", "profile": "cifarnet"},
            "exchange": exchange,
            "network": {"bandwidth": bandwidth, "latency": "200 us"},
        }
    )
    found = with_compression(topology, tmp_path, None, Shown(json_lines=False))
    assert found.exchange.compression == expected
    assert found.compute == topology.compute
    assert ("compression = " in capsys.readouterr().out) == (expected != "auto")
