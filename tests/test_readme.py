"""What the README shows must work, and what it names must be there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.launcher.launched import Launched
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.timeouts import Timeouts

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_its_program_trains(tmp_path: Path) -> None:
    (program,), (topology,) = blocks("python"), blocks("toml")
    (tmp_path / "task.py").write_text(program)
    (tmp_path / "two-groups.toml").write_text(topology)
    assert len(program.splitlines()) <= 20
    with Launched(tmp_path, "two-groups.toml") as run:
        assert run.end() == 0, run
        summary = run.json("summary.json")
    assert summary["status"] == "done"
    assert summary["eval"]["eval_accuracy"] > 0.8


def test_its_topology_has_no_fault() -> None:
    topology = parse_topology(blocks("toml")[0])
    assert (topology.compute.groups, topology.compute.group_size, topology.servers) == (2, 2, 2)


def test_the_timeouts_in_the_guarantees_are_the_timeouts() -> None:
    guarantees, rows = (ROOT / "docs" / "understanding" / "guarantees.md").read_text(), Timeouts.of(60).rows()
    assert "| timeout = 60 s | " + " | ".join(row.name for row in rows) + " |" in guarantees
    assert "| seconds | " + " | ".join(f"{row.seconds:g}" for row in rows) + " |" in guarantees


def test_its_picture_is_there_and_fetches_nothing() -> None:
    (picture,) = re.findall(r"!\[.*?\]\((.*?)\)", README)
    drawn = (ROOT / picture).read_text()
    assert "launch/digits.toml" in drawn.replace("&#160;", " ")
    assert "url(http" not in drawn.replace('"', "")


def test_its_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make (\w+)`", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
