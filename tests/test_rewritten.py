"""Processes that run tests share the work of compiling them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.rewritten import compile_share


class Folder:
    """A configuration of pytest whose tests are elsewhere."""

    def __init__(self, config: pytest.Config, rootpath: Path) -> None:
        self._config, self.rootpath = config, rootpath

    def __getattr__(self, name: str) -> object:
        return getattr(self._config, name)


def test_all_shares_together_are_all_files(tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    config: pytest.Config = Folder(pytestconfig, tmp_path)  # type: ignore[assignment]
    files = [tmp_path / "tests" / folder / f"test_{number}.py" for folder in ("a", "b") for number in range(5)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("def test_it():\n    assert 1 + 1 == 3\n")
    assert [compile_share(config, number, 3) for number in range(3)] == [4, 3, 3]
    for file in files:  # as pytest itself looks for it, and with messages
        code = rewrite._read_pyc(file, file.parent / "__pycache__" / f"{file.stem}{rewrite.PYC_TAIL}")
        assert code is not None
        assert "@pytest_ar" in code.co_names
    assert [compile_share(config, number, 3) for number in range(3)] == [0, 0, 0]
    files[0].write_text("def test_it():\n    pass\n")  # another size: compiled anew
    assert compile_share(config, 0, 1) == 1


def test_nothing_is_written_where_python_keeps_nothing(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "tests" / "test_one.py"
    file.parent.mkdir()
    file.write_text("def test_it(): pass\n")
    assert compile_share(Folder(pytestconfig, tmp_path), 0, 1) == 0  # type: ignore[arg-type]
    assert list(file.parent.iterdir()) == [file]
