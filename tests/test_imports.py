"""What the package imports, and what it must not: torch where nobody computes, and pickle anywhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zmqtrain
from tests.patience import PATIENCE_S

PACKAGE = Path(zmqtrain.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

#: What must start at once: commands, agents, and everything they are made of.
LIGHT = [
    "zmqtrain",
    "zmqtrain.cli.main",
    "zmqtrain.embed",
    "zmqtrain.launcher.agent",
    "zmqtrain.membership.client",
    "zmqtrain.membership.coordinator",
    "zmqtrain.net.memory",
    "zmqtrain.net.zeromq",
    "zmqtrain.simulate.program",
    "zmqtrain.cli.simulate",
    "zmqtrain.testing",
    "zmqtrain.topology.load",
    "zmqtrain.topology.placement",
    "zmqtrain.train",
    "zmqtrain.wire.message",
]


def test_what_starts_at_once_does_not_import_torch() -> None:
    imports = "\n".join(f"import {name}" for name in LIGHT)
    code = f"import sys\n{imports}\nprint(sorted(name for name in sys.modules if name in ('torch', 'sklearn', 'scipy')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_a_launch_forks_before_it_imports_what_only_the_launcher_needs() -> None:
    """The processes that it forks import torch meanwhile."""
    code = """
import sys
import zmqtrain.cli.launch, zmqtrain.launcher.prepared
names = ("torch", "rich.console", "tarfile", "zmqtrain.cli.lead", "zmqtrain.launcher.run", "zmqtrain.membership.coordinator")
print([name for name in names if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_what_ranks_and_forking_processes_import() -> None:
    """A process group needs no schema of topology files: each rank imports what it is made of when it begins. A process that forks
    after CUDA was initialized has children that cannot use it; even counting devices may be too much."""
    names = ("is_available", "device_count", "init", "_lazy_init", "current_device", "set_device", "Stream", "Event")
    code = f"""
import sys
import torch
asked = []
for name in {names}:
    setattr(torch.cuda, name, lambda *_, name=name, **__: asked.append(name))
import zmqtrain.c10d.process_group, zmqtrain.c10d.rendezvous
assert "pydantic" not in sys.modules
from zmqtrain.launcher.entries import SCRIPT_ENTRY
from zmqtrain.launcher.forkserver import import_entry
import_entry(SCRIPT_ENTRY)
assert "zmqtrain.run.role" in sys.modules, "children import it themselves"
print(asked)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_public_names_are_there() -> None:
    for name in zmqtrain.__all__:
        assert getattr(zmqtrain, name) is not None
        assert name in dir(zmqtrain)
    with pytest.raises(AttributeError, match="no attribute 'sesion'"):
        zmqtrain.sesion  # type: ignore[attr-defined]  # noqa: B018


def test_no_pickle_and_no_torch_load() -> None:
    found = [f"{path.relative_to(PACKAGE.parent)}:{line}: {what}" for path in SOURCES for line, what in _unsafe(path)]
    assert not found, "\n".join(found)


def test_only_its_own_tests_import_the_laboratory() -> None:
    """An import contract keeps it out of the package."""
    tests = PACKAGE.parent / "tests"
    found = [str(path) for path in tests.rglob("*.py") if tests / "benchmarks" not in path.parents and _imports(path, "benchmarks")]
    assert not found, "\n".join(found)
    assert _imports(tests / "benchmarks" / "test_case.py", "benchmarks")


def test_unsafe_calls_are_recognized(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "import pickle\nfrom torch import load\nimport cloudpickle.x\nimport torch\ntorch.load('x')\nnp.load('x')\neval('1')\n"
    )
    assert [line for line, _ in _unsafe(file)] == [1, 2, 3, 5, 6, 7]


def _imports(path: Path, package: str) -> bool:
    if package not in (text := path.read_text()):  # most files: they need not be parsed
        return False
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(name.partition(".")[0] == package for name in names)


def _unsafe(path: Path) -> list[tuple[int, str]]:
    """Imports and calls by which foreign bytes could run as code, with their lines."""
    modules = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    calls = {"torch.load", "torch.save", "np.load", "numpy.load", "eval", "exec"}
    words = (*modules, *(name.rpartition(".")[2] for name in calls))
    if not re.search(rf"\b({'|'.join(words)})\b", text := path.read_text()):  # most files: they need not be parsed
        return []
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            names = [ast.unparse(node.func)]
            names = [name for name in names if name in calls]
        else:
            continue
        found += [(node.lineno, name) for name in names if name.partition(".")[0] in modules or name in calls]
    return sorted(set(found))


def test_the_interface_is_imported_as_it_is_used() -> None:
    """`zmqtrain.simulate` and `zmqtrain.plan` are functions, however and whenever the packages of those names were imported."""
    code = """
import sys
import zmqtrain
assert not {name for name in sys.modules if name.startswith("zmqtrain.")}, "nothing before it is used"
assert callable(zmqtrain.simulate)
import zmqtrain.plan.decided, zmqtrain.simulate.run
assert callable(zmqtrain.simulate) and callable(zmqtrain.plan)
from zmqtrain import simulate
assert callable(simulate)
zmqtrain.load_topology, zmqtrain.Topology, zmqtrain.open_run, zmqtrain.run_role
assert "torch" not in sys.modules
for name in zmqtrain.__all__:
    assert getattr(zmqtrain, name) is not None and (name == "__version__" or getattr(zmqtrain, name).__doc__), name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
