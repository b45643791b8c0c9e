"""Engines by name, and those that packages bring."""

from __future__ import annotations

import asyncio
import shutil
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from tests.launcher.environment.nodes import TOKEN, Nodes
from zmqtrain.errors import EngineError, HostLostError, UsageError
from zmqtrain.launcher.engine import BUILT_IN, Engine, GatheringEngine, RemoteEngine, engine_faults, make_engine

ROOT = Path(__file__).parents[2]

FAULTY = """
import asyncio

class NoEngine:
    pass

class NotAsync:
    def start(self, host, command, environ): ...
    def stop(self, handle, grace): ...

class Fails:
    async def start(self, host, command, environ):
        raise RuntimeError("no machine is free")
    async def stop(self, handle, grace): ...

class NoHandle(Fails):
    async def start(self, host, command, environ):
        return 7

def broken():
    raise OSError("no such device")
"""


def bring(folder: Path, **engines: str) -> None:
    """What pip leaves of a package with these entry points."""
    info = folder / f"{'_'.join(engines)}-1.0.dist-info"
    info.mkdir()
    name = "-".join(engines)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: package-of-{name}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in engines.items()]
    (info / "entry_points.txt").write_text("\n".join(["[zmqtrain.engines]", *lines, ""]))
    (folder / "faulty_engines.py").write_text(FAULTY)


@pytest.mark.parametrize("kind", [kind for kind in BUILT_IN if kind != "ray"])
def test_our_own(kind: str) -> None:
    engine = make_engine(kind)
    assert isinstance(engine, Engine)
    assert isinstance(engine, RemoteEngine) == (kind != "local")
    assert isinstance(engine, GatheringEngine) == (kind in ("environment", "kubernetes"))


def test_an_unknown_name() -> None:
    with pytest.raises(UsageError, match=r"no such engine; did you mean 'kubernetes'\? Choose one of local, ssh"):
        make_engine("kubernets")


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("faulty_engines:NoEngine", EngineError, "NoEngine, which is not an engine: it lacks start and stop"),
        ("faulty_engines:NotAsync", EngineError, "start and stop must be coroutines"),
        ("faulty_engines:broken", EngineError, "cannot be loaded: OSError: no such device"),
        ("faulty_engines:missing", EngineError, "cannot be loaded: AttributeError"),
        ("faulty_nothing:Engine", EngineError, "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_faulty_plug_ins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, error: type[Exception], message: str
) -> None:
    bring(tmp_path, faulty=target)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faulty_engines", raising=False)
    with pytest.raises(error) as caught:
        make_engine("faulty")
    assert message in str(caught.value)
    assert "package-of-faulty 1.0" in str(caught.value)


def test_what_an_engine_raises_names_it() -> None:
    with pytest.raises(EngineError, match="the engine 'x' could not start alpha: KeyError: 'y'"), engine_faults("x", "start alpha"):
        raise KeyError("y")
    with pytest.raises(HostLostError), engine_faults("x", "start alpha"):
        raise HostLostError("ours")
    with pytest.raises(asyncio.CancelledError), engine_faults("x", "start alpha"):
        raise asyncio.CancelledError


def test_a_run_by_the_example_plug_in(tmp_path: Path) -> None:
    """The package of examples/engine_plugin, laid out as pip does, starts a real run; faulty ones say what is wrong."""
    site = tmp_path / "site"
    site.mkdir()
    plugin = ROOT / "examples" / "engine_plugin"
    project = tomllib.loads((plugin / "pyproject.toml").read_text())
    for file in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]:
        shutil.copy(plugin / file, site)
    bring(site, **project["project"]["entry-points"]["zmqtrain.engines"])
    bring(site, fails="faulty_engines:Fails", nohandle="faulty_engines:NoHandle")
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import os, zmqtrain
        with zmqtrain.session() as session:
            print("ready", os.environ["VIA"])
            session.barrier()
        """)
    )
    options = "options = { start = 'VIA={via}-{name} exec {agent}', via = 'shell' }"
    (tmp_path / "trial.toml").write_text(
        f"[job]\nname = 'trial'\ntimeout = '60 s'\n[compute]\nthreads = 1\n[engine]\nkind = 'command'\n{options}\n"
        "[[hosts]]\nname = 'alpha'\nslots = 1\n"
    )
    environ = {"PYTHONPATH": f"{site}:{ROOT}"}
    with Nodes(tmp_path) as nodes:
        for name, more in (
            ("good", []),
            ("fails", ["--set", "engine.kind=fails"]),
            ("nohandle", ["--set", "engine.kind=nohandle"]),
            ("wrong", ["--set", "engine.options.start={agent} {image}"]),
        ):
            nodes.start(name, ["launch", "--run-dir", name, *more, "trial.toml", "script.py"], environ)
        assert nodes.end("good") == 0, nodes
        assert "alpha: started" in nodes.said("good")
        assert "worker/0 | ready shell-alpha" in nodes.said("good")
        assert nodes.end("fails") == 71, nodes
        assert "the engine 'fails' could not start the agent of alpha: RuntimeError: no machine is free" in nodes.said("fails")
        assert 'raise RuntimeError("no machine is free")' in nodes.said("fails")
        assert nodes.end("nohandle") == 71, nodes
        assert "its start returned int, which is not a handle" in nodes.said("nohandle")
        assert nodes.end("wrong") == 2, nodes
        assert "'image' is no option" in nodes.said("wrong")
        nodes.all_gone()
        assert TOKEN not in nodes.said("good")
