"""An emulated cluster with a slow device, a slow loader and a slow link: each is named."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launcher.launched import Launched

PROFILE = {"layers": [{"name": "all", "numel": 250_000, "forward_s": 0.02, "backward_s": 0.04}]}
TOPOLOGY = """
[job]
steps = 100000
timeout = "60 s"
checkpoint_every = 0
oversubscribe = true
[[hosts]]
name = "h[1-5]"
slots = 1
[compute]
groups = 5
device = "modelled"
profile = "profile.json"
[exchange]
kind = "gossip"
[network]
bandwidth = "200 Mbit/s"
[[network.hosts]]
name = "h2"
slowdown = 8.0
[[network.hosts]]
name = "h3"
loading = "500 ms"
[[network.hosts]]
name = "h4"
bandwidth = "20 Mbit/s"
"""


def test_each_is_named(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    (tmp_path / "trial.toml").write_text(TOPOLOGY)
    with Launched(tmp_path, "trial.toml", "--emulate") as run:
        for peer, what in (("worker/1", "device"), ("worker/2", "loader"), ("worker/3", "link")):
            run.wait_for(f"{peer} is slow: its {what}")
