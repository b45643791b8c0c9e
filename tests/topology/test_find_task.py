"""Finding the task's function without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.topology.find_task import find_task

CODE = """\
raise SystemExit("this must not run")
import os as system
if True:
    def task(): ...
try:
    other = 1
except ImportError:
    fallback = 2
class Third: ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for package in ("one", "one/two"):
        (tmp_path / package).mkdir()
    (tmp_path / "one/two/__init__.py").write_text(CODE)  # `one` is a namespace package
    (tmp_path / "one/two/job.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("def task(:\n")
    (tmp_path / "star.py").write_text("from one.two.job import *\n")
    return tmp_path


@pytest.mark.parametrize(
    ("task", "file", "function"),
    [
        ("one.two.job:task", "one/two/job.py", "task"),
        ("one.two.job", "one/two/job.py", "task"),
        ("one.two:other", "one/two/__init__.py", "other"),
        ("one/two/job.py:fallback", "one/two/job.py", "fallback"),
        ("one.two.job:Third", "one/two/job.py", "Third"),
        ("one.two.job:system", "one/two/job.py", "system"),
        ("star:anything", "star.py", "anything"),
    ],
)
def test_found(folder: Path, task: str, file: str, function: str) -> None:
    place = find_task(task, [folder])
    assert (place.file, place.function) == (folder / file, function)


def test_an_installed_module_is_found() -> None:
    assert find_task("json.decoder:JSONDecoder").file.name == "decoder.py"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("missing.py:task", "there is no file .*missing.py"),
        ("one.missing:task", "there is no module one.missing. Install it, or add its folder to .job. python_path"),
        ("nowhere.at.all:task", "there is no module nowhere"),
        ("train.ipynb:task", "train.ipynb is a notebook, which other processes cannot import"),
        ("one.two.job:tusk", "has no function 'tusk'; did you mean 'task'"),
        ("broken.py:task", "cannot be read"),
        ("math:sin", "is not a Python source file"),
    ],
)
def test_not_found(folder: Path, task: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        find_task(task, [folder])
    assert "there is no folder" not in str(caught.value)


@pytest.mark.parametrize("task", ["missing.py:task", "missing:task"])
def test_a_folder_that_does_not_exist_is_named(folder: Path, task: str) -> None:
    with pytest.raises(UsageError, match=r"\(there is no folder .*nowhere: see .job. python_path\)$"):
        find_task(task, [folder, folder / "nowhere"])
