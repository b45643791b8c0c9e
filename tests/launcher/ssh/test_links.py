"""Links between machines that are logged in to: probes go there over ssh, and nothing stays."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.launcher.ssh.machines import command, machines
from tests.patience import PATIENCE_S

HEAD = """
[job]
name = "trial"
task = "is_not_needed.py:task"
timeout = "20 s"

[compute]
group_size = 2

[engine]
kind = "ssh"
"""


def test_links_between_machines_are_measured_over_ssh(tmp_path: Path) -> None:
    folder = tmp_path / "machines"
    folder.mkdir()
    with machines(2, folder) as two:
        (tmp_path / "trial.toml").write_text(HEAD + two.hosts())
        done = subprocess.run(
            command("profile", "trial.toml", "--links", "--json"), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert [(row["row"], row.get("name", row.get("source"))) for row in rows] == [
            ("host", "m1"),
            ("host", "m2"),
            ("link", "m1"),
            ("link", "m2"),
        ]
        assert all(row["bandwidth"] > 1e6 and 0 < row["latency_s"] < 1 for row in rows[2:])
        assert two.left() == []
