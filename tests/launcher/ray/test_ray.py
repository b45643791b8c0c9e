"""The Ray engine: what it asks for, and real runs on a cluster of two nodes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.launcher.environment.nodes import Nodes
from tests.launcher.ready import warm
from tests.patience import PATIENCE_S
from zmqtrain.errors import UsageError
from zmqtrain.launcher.engine import Gathering
from zmqtrain.launcher.ray import engine as engine_module
from zmqtrain.launcher.ray.engine import RayEngine, bundle_of
from zmqtrain.topology.schema import Topology

ROOT = Path(__file__).parents[3]

TOPOLOGY = """
[job]
name = "trial"
timeout = "100 s"
transport_encryption = "required"
[compute]
groups = 2
batch_size = 4
threads = 1
[exchange]
kind = "allreduce"
[engine]
kind = "ray"
ray = {{ address = "{address}", nodes = 2 }}
"""
#: Joins and meets the other one. Then it stays, where it is told to.
SCRIPT = """
import os, sys, time, zmqtrain
with zmqtrain.session() as session:
    print("ready", os.environ["ZMQTRAIN_PEER"], os.getcwd(), flush=True)
    with open(f"{sys.argv[1]}-{session.rank}", "w") as file:
        file.write(str(os.getpid()))
    session.barrier()
    while sys.argv[1] == "stays":
        time.sleep(0.1)
"""


def topology(**more: object) -> Topology:
    return Topology.from_dict({"job": {}, "engine": {"kind": "ray"}, **more})


def test_what_is_asked_of_the_cluster() -> None:
    (alone,) = topology(compute={"groups": 2, "threads": 3}).hosts
    assert (alone.name, alone.slots) == ("node1", 6)
    settings = {"kind": "ray", "ray": {"nodes": 3, "cpus": 4, "gpus": 2}}
    hosts = topology(engine=settings).hosts
    assert [host.name for host in hosts] == ["node1", "node2", "node3"]
    assert bundle_of(hosts[0]) == {"CPU": 4, "GPU": 2}
    listed = topology(hosts=[{"name": "a", "slots": 2}, {"name": "b", "slots": 1, "devices": ["cuda:0"]}]).hosts
    assert [bundle_of(host) for host in listed] == [{"CPU": 2}, {"CPU": 1, "GPU": 1}]


async def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "find_spec", lambda _name: None)
    engine = RayEngine()
    with pytest.raises(UsageError, match=r"pip install zmqtrain\[ray\]"):
        await engine.gather(Gathering(topology(), tmp_path, print))
    await engine.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install zmqtrain[ray]")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_prestart_worker_first_driver": "0"}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("cluster.py"))],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        lines = (line.split() for line in process.stdout)
        yield next(words[1] for words in lines if words[:1] == ["address"])
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.stdin.close()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for left in psutil.wait_procs(family, timeout=5)[1]:
            left.kill()
        process.stdout.close()


def test_runs_on_a_cluster(tmp_path: Path, cluster: str) -> None:
    """Two at once: one comes to its end, the other loses an actor, and with it a host."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {"PYTHONPATH": str(ROOT)}
    with warm() as started, Nodes(tmp_path) as nodes:
        # Agents of one find fork servers, as in other tests; those of the other start their own.
        hosts = f'[[hosts]]\nname = "node[1-2]"\nslots = 1\npython = "{started.python}"\n'
        for name, more in (("ends", hosts), ("stays", "")):
            (tmp_path / f"{name}.toml").write_text(TOPOLOGY.format(address=cluster) + more)
            nodes.start(name, ["launch", "--run-dir", name, f"{name}.toml", "script.py", name], environ)
        nodes.until(lambda: all((tmp_path / f"stays-{rank}").exists() for rank in range(2)))
        roles = [psutil.Process(int((tmp_path / f"stays-{rank}").read_text())) for rank in range(2)]
        agents = [role.parent().parent() for role in roles]
        assert [agent.environ()["ZMQTRAIN_PEER"] for agent in agents] == ["agent/node1", "agent/node2"]
        assert [role.nice() for role in roles] == [os.nice(0)] * 2, "Ray's own workers are nicer"
        actor = agents[1].parent()
        assert "AgentActor" in actor.cmdline()[0]
        actor.kill()
        assert nodes.end("stays") == 129, nodes
        assert nodes.end("ends") == 0, nodes
        nodes.all_gone()
        left = psutil.wait_procs([*roles, *agents], timeout=PATIENCE_S)[1]
        assert not left
        error = json.loads((tmp_path / "stays" / "error.json").read_text())
        assert (error["verdict"], error["peer"]) == ("host lost", "agent/node2")
        summary = json.loads((tmp_path / "ends" / "summary.json").read_text())
        assert (summary["hosts"], summary["encrypted"]) == (["node1", "node2"], True)
        assert f"worker/1 | ready worker/1 {tmp_path}" in nodes.said("ends")
