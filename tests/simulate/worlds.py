"""Small jobs to simulate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zmqtrain.topology.schema import Topology

#: Four layers, 30 ms a step of 32 samples.
PROFILE = {
    "layers": [{"name": f"layer{n}", "numel": 5000, "forward_s": 0.0025, "backward_s": 0.005} for n in range(4)],
    "batch_size": 32,
}


def profile_file(folder: Path, **changes: Any) -> str:
    """A profile for tests, on disk."""
    file = folder / "profile.json"
    file.write_text(json.dumps(PROFILE | changes))
    return str(file)


def topology_of(profile: str, *, workers: int = 4, hosts: int = 4, **sections: Any) -> Topology:
    """A job with model servers on modelled devices."""
    document: dict[str, Any] = {
        "job": {"name": "test", "steps": 12, "timeout": "20 s"},
        "hosts": [{"name": f"h[1-{hosts}]", "slots": -(-workers // hosts)}] if hosts > 1 else [{"name": "h1", "slots": workers}],
        "compute": {"groups": workers, "batch_size": 32, "device": "modelled", "profile": profile, "bucket_size": "16 KiB"},
        "exchange": {"kind": "model_server", "staleness": "async", "shards": 2},
        "network": {"bandwidth": "1 Gbit/s", "latency": "200 us"},
        "simulation": {"payload": "small"},
    }
    for name, values in sections.items():
        document[name] = document.get(name, {}) | values if isinstance(values, dict) else values
    return Topology.from_dict(document)
