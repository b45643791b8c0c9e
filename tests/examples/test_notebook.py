"""The notebook in a kernel, as a person runs it; its cells are those of the tutorial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.ready import warm
from tests.patience import PATIENCE_S
from tests.test_tutorials import BLOCK, ROOT, words

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
TUTORIAL = (ROOT / "docs" / "tutorials" / "notebook.md").read_text()


def test_the_tutorial_has_the_notebook_s_cells() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = [block.rstrip("\n") for language, block in BLOCK.findall(TUTORIAL) if language == "python"]
    assert ["".join(cell["source"]) for cell in cells] == shown
    assert not any(cell["outputs"] for cell in cells), "outputs are not kept in the repository"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name, value in (("PYTHONPATH", ROOT), ("IPYTHONDIR", tmp_path / "ipython"), ("JUPYTER_RUNTIME_DIR", tmp_path / "jupyter")):
        monkeypatch.setenv(name, str(value))
    book = nbformat.read(NOTEBOOK, 4)
    for cell in book.cells:
        cell.source = cell.source.replace('"steps": 4', '"steps": 1')  # of simulations, whose time it is
    folder = {"metadata": {"path": str(tmp_path)}}
    with warm() as started:
        for name, place in started.variables.items():
            monkeypatch.setenv(name, place)
        nbclient.NotebookClient(book, timeout=PATIENCE_S, startup_timeout=PATIENCE_S, resources=folder).execute()
    cells = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    _, simulated, _, planned, launched, _, _, plotted = cells
    for (output,) in (simulated, planned, launched):  # no errors, and no lines beside them
        assert "<svg" in output.data["text/html"]
    (output,) = launched
    assert "<b>task-001: done</b>" in output.data["text/html"], "the last state of what was shown while it trained"
    assert "\x1b" not in output.data["text/html"], "a terminal's colours"
    assert plotted[0].data["image/svg+xml"].startswith("<svg")
    printed = [" ".join(words(line)) for outputs in cells for each in outputs for line in _text(each).splitlines()]
    for language, block in BLOCK.findall(TUTORIAL):
        if language == "text":
            for line in block.splitlines():
                assert any(" ".join(words(line)) in each for each in printed), line


def _text(output: Any) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))
