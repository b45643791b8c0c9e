"""What a resumed run is told of the run before: by its directory, wherever the checkpoint is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqtrain.run.resumed import changed_since
from zmqtrain.topology.load import parse_topology
from zmqtrain.train.checkpoint.folder import META

NEW = parse_topology('[job]\ntask = "a.py:task"\n[compute]\nbatch_size = 8\n')


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory, with a checkpoint as far as it is looked for."""
    checkpoint = tmp_path / "old-001" / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / META).touch()
    return tmp_path / "old-001"


@pytest.mark.parametrize("where", [".", "checkpoints", "checkpoints/step-00000007", ".."])
def test_a_change_is_noted(run: Path, where: str) -> None:
    (run / "topology.toml").write_text('[job]\ntask = "a.py:task"\n[compute]\nbatch_size = 4\n')
    assert changed_since(run / where, NEW).endswith("old-001 was trained otherwise: [compute] batch_size = 8 (was 4)")


@pytest.mark.parametrize("text", [NEW.to_toml(), "[job", "[job]\nunheard_of = 1\n"])
def test_nothing_is_said_without_a_change_or_where_the_file_cannot_be_read(run: Path, text: str) -> None:
    (run / "topology.toml").write_text(text)
    assert changed_since(run, NEW) == ""


def test_nothing_is_said_where_no_run_or_no_checkpoint_is(run: Path, tmp_path: Path) -> None:
    assert changed_since(run, NEW) == ""
    assert changed_since(tmp_path / "none", NEW) == ""
