"""A module beside the task of which there is another is refused, before the other is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zmqtrain.errors import TaskError, UsageError
from zmqtrain.train.task import load_task


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a task, and its older copy, which is installed."""
    installed, project = tmp_path / "installed", tmp_path / "project"
    for folder in (installed, project):
        (folder / "shadowed_package").mkdir(parents=True)
        (folder / "shadowed_package" / "__init__.py").touch()
        (folder / "shadowed_package" / "tasks.py").write_text(f"WHERE = {folder.name!r}\n")
    (project / "shadowed_helper.py").write_text("def load():\n    import shadowed_package.tasks\n")
    (project / "direct.py").write_text("from shadowed_package.tasks import WHERE\n")
    (project / "through_another.py").write_text("import shadowed_helper\n")
    (project / "random.py").write_text("import random\nrandom.randint(1, 2)\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    yield project
    for name in [name for name in sys.modules if name.startswith(("shadowed_", "zmqtrain_task_"))]:
        del sys.modules[name]


@pytest.mark.parametrize("spec", ["direct.py", "through_another.py", "shadowed_package.tasks"])
def test_an_installed_module_is_not_taken_for_the_one_beside_the_task(spec: str, project: Path) -> None:
    with pytest.raises(UsageError, match=r"'shadowed_package', and there are two such modules: .*put yours first"):
        load_task(spec, folders=(project,))


def test_yours_may_come_first(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    for spec in ("direct.py", "through_another.py", "shadowed_package.tasks"):
        with pytest.raises((UsageError, TaskError), match="has no function 'task'"):
            load_task(spec, folders=(project,))


def test_a_task_may_have_the_name_of_a_module_that_it_imports(project: Path) -> None:
    with pytest.raises(UsageError, match="has no function 'task'"):
        load_task("random.py", folders=(project,))
