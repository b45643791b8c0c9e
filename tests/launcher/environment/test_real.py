"""Real runs whose agents were started by somebody else."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.environment.nodes import TOKEN, Nodes, free_port
from tests.launcher.ready import warm
from zmqtrain.errors import HostLostError
from zmqtrain.launcher.engine import Gathering
from zmqtrain.launcher.environment.engine import EnvironmentEngine
from zmqtrain.launcher.forkserver import ADOPTED
from zmqtrain.launcher.namespaces import Namespaces, NoNamespacesError
from zmqtrain.topology.schema import Topology

TOPOLOGY = """
[job]
name = "trial"
timeout = "{timeout_s} s"
port = {port}
transport_encryption = "required"
[compute]
groups = 2
batch_size = 4
threads = 1
shared_memory = false
[exchange]
kind = "allreduce"
"""
LISTED = """
[engine]
kind = "environment"
[[hosts]]
name = "alpha"
slots = 1
[[hosts]]
name = "beta"
slots = 1
"""
#: Joins and waits for others; the second one is wrong where it is told to.
SCRIPT = """
import os, sys, time, zmqtrain
with zmqtrain.session() as session:
    print("ready", os.environ["ZMQTRAIN_HOST"], flush=True)
    open(f"ready-{session.rank}", "w").close()
    session.barrier()
    if sys.argv[1:] == ["wrong"] and session.rank == 1:
        raise ValueError("this model is wrong")
    time.sleep(600)
"""


def prepare(folder: Path, more: str = "", *, timeout_s: float = 60.0) -> int:
    """``timeout_s``: roles have twice that to join, half a minute on a busy machine; a silent host is lost after half."""
    port = free_port()
    (folder / "trial.toml").write_text(TOPOLOGY.format(port=port, timeout_s=timeout_s) + more)
    (folder / "script.py").write_text(SCRIPT)
    return port


def until_ready(nodes: Nodes) -> None:
    nodes.until(lambda: all((nodes.folder / f"ready-{rank}").exists() for rank in range(2)))
    nodes.processes()


def test_an_agent_that_is_killed_is_a_lost_host(tmp_path: Path) -> None:
    """The agents are there before the launcher, and one that has another token is not let in."""
    port = prepare(tmp_path, LISTED, timeout_s=24.0)
    with warm() as started, Nodes(tmp_path) as nodes:
        where = {"ZMQTRAIN_COORDINATOR": f"127.0.0.1:{port}", ADOPTED: started.variables[ADOPTED]}
        beta = nodes.start("beta", ["agent"], {**where, "ZMQTRAIN_NAME": "beta"})
        nodes.start("stranger", ["agent"], {**where, "ZMQTRAIN_TOKEN": "the token of another run"})
        nodes.start("launcher", ["launch", "--run-dir", "run", "trial.toml", "script.py"], {})
        assert nodes.end("stranger") == 65, nodes
        assert "another run token" in nodes.said("stranger")
        nodes.start("alpha", ["agent"], {**where, "ZMQTRAIN_NODE_RANK": "0", "ZMQTRAIN_HOST": "127.0.0.3"})
        until_ready(nodes)
        assert not any(TOKEN in word for process in nodes.processes() if process.is_running() for word in process.cmdline())
        beta.kill()
        assert nodes.end("launcher") == 129, nodes
        assert nodes.end("alpha") == 0, nodes
        nodes.all_gone()
        assert "refused: 127.0.0.1 has another token" in nodes.said("launcher")
        assert "worker/0 | ready 127.0.0.3" in nodes.said("launcher")
        error = json.loads((tmp_path / "run" / "error.json").read_text())
        assert (error["verdict"], error["peer"]) == ("host lost", "agent/beta")
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["encrypted"] is True
        assert not any(TOKEN in path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file())


@pytest.fixture
def two() -> Iterator[Namespaces | None]:
    """Two machines, where they can be made; else all is on this one."""
    namespaces = Namespaces(dict.fromkeys(("m0", "m1")))
    try:
        try:
            asyncio.run(namespaces.open())
        except NoNamespacesError:
            yield None
        else:
            yield namespaces
    finally:
        asyncio.run(namespaces.close())


def test_all_nodes_run_the_same_command(tmp_path: Path, two: Namespaces | None) -> None:
    """As torchrun has it: the first node launches. Its exit code says that the person's own code failed."""
    port = prepare(tmp_path)
    (tmp_path / "trial.toml").write_text((tmp_path / "trial.toml").read_text().replace("required", "auto"))
    addresses = ["127.0.0.1"] * 2 if two is None else [two.address_of(f"m{rank}") for rank in range(2)]
    with warm() as started, Nodes(tmp_path) as nodes:
        for rank in (1, 0):
            said = {"MASTER_ADDR": addresses[0], "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
            said[ADOPTED] = started.variables[ADOPTED]
            within = () if two is None else two.command(f"m{rank}", ())
            nodes.start(f"node{rank}", ["agent", "--run-dir", "run", "trial.toml", "script.py", "wrong"], said, within)
        assert nodes.end("node0") == 3, nodes
        assert nodes.end("node1") == 0, nodes
        nodes.all_gone()
        assert 'raise ValueError("this model is wrong")' in nodes.said("node0")
        # The first node's own agent has come over the loopback interface; others reach it where they have reached the launcher.
        assert {f"worker/{rank} | ready {address}" for rank, address in enumerate(addresses)} <= set(
            nodes.said("node0").splitlines()
        )
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["encrypted"] is (two is not None)


def test_a_node_that_is_told_to_end_before_the_run(tmp_path: Path) -> None:
    with Nodes(tmp_path) as nodes:
        node = nodes.start("node", ["agent"], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"})
        nodes.until(lambda: "waiting for the launcher at 127.0.0.1:9" in nodes.said("node"))
        node.send_signal(signal.SIGTERM)
        assert nodes.end("node") == 128 + signal.SIGTERM, nodes


async def test_those_who_do_not_come_are_named(tmp_path: Path) -> None:
    hosts = [{"name": f"node{number}"} for number in range(12)]
    values = {"job": {"port": free_port()}, "engine": {"kind": "environment", "wait": 0.1}, "hosts": hosts}
    said: list[str] = []
    engine = EnvironmentEngine(environ={})
    try:
        with pytest.raises(HostLostError, match=r"node0, .*, node7 and 4 more") as caught:
            await engine.gather(Gathering(Topology.from_dict(values), tmp_path, said.append))
        assert (tmp_path / "token").exists()
    finally:
        await engine.close()
    assert not (tmp_path / "token").exists()
    assert "ZMQTRAIN_TOKEN" in str(caught.value)
    assert "ZMQTRAIN_NAME" in str(caught.value)
    assert "zmqtrain agent" in said[0]
