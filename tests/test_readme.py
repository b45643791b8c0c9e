"""What the README shows must work, and what it names must be there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.timeouts import Timeouts

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_its_program_trains(tmp_path: Path) -> None:
    (program,), (topology,) = blocks("python"), blocks("toml")
    (tmp_path / "task.py").write_text(program)
    (tmp_path / "two-groups.toml").write_text(topology)
    assert len(program.splitlines()) <= 20
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "zmqtrain", "launch", "two-groups.toml", "--run-dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["eval"]["eval_accuracy"] > 0.8


def test_its_topology_has_no_fault() -> None:
    topology = parse_topology(blocks("toml")[0])
    assert (topology.compute.groups, topology.compute.group_size, topology.servers) == (2, 2, 2)


def test_its_timeouts_are_the_timeouts() -> None:
    rows = Timeouts.of(60).rows()
    assert "| timeout = 60 s | " + " | ".join(row.name for row in rows) + " |" in README
    assert "| seconds | " + " | ".join(f"{row.seconds:g}" for row in rows) + " |" in README


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_its_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make (\w+)`", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
