"""Links between hosts are measured by probes that some engine starts; one real run at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from zmqtrain.cli.profile import run_profile
from zmqtrain.errors import UsageError, ZmqTrainError
from zmqtrain.launcher.engine import Engine, Gathering
from zmqtrain.launcher.fleet import gathered_hosts
from zmqtrain.launcher.link_probe import LinkProbe
from zmqtrain.launcher.links import ALL_PAIRS, Links, measure_links, pairs_of
from zmqtrain.launcher.probes import Probes
from zmqtrain.membership.environment import RoleEnvironment
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.node import Node
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.schema import Host, Topology
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.train.device.profile import Profile


def test_all_pairs_of_few_hosts_and_neighbours_of_many() -> None:
    assert pairs_of(["a", "b"]) == [("a", "b"), ("b", "a")]
    few = [str(number) for number in range(ALL_PAIRS)]
    assert len(pairs_of(few)) == ALL_PAIRS * (ALL_PAIRS - 1)
    many = [str(number) for number in range(40)]
    pairs = pairs_of(many)
    assert len(pairs) == len(set(pairs)) == 2 * (40 + 37)
    assert all((other, one) in pairs for one, other in pairs)


class MemoryEngine:
    """Starts probes as coroutines on one in-memory network."""

    def __init__(self, network: MemoryNetwork, *, broken: str = "") -> None:
        self.network, self.broken, self.stopped = network, broken, 0

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> asyncio.Task[int]:
        environment = RoleEnvironment.from_environ(environ)
        assert environment is not None
        return asyncio.create_task(self._live(environment, fails=host.name == self.broken))

    async def _live(self, environment: RoleEnvironment, *, fails: bool) -> int:
        if fails:
            return 3
        endpoint = self.network.endpoint(environment.peer)
        probe = LinkProbe(endpoint, patience_s=5.0, multiply=lambda threads: 1e9 * threads)
        endpoint.add_peer("coordinator", environment.coordinator)
        await endpoint.request("coordinator", "probe.here", endpoint.address, timeout=5.0)
        await probe.ended.wait()
        await endpoint.close()
        return 0

    async def stop(self, handle: asyncio.Task[int], grace: float) -> None:
        self.stopped += 1
        handle.cancel()
        await asyncio.wait({handle})


class _Handle:
    def __init__(self, task: asyncio.Task[int]) -> None:
        self.task = task

    async def wait(self) -> int:
        return await asyncio.shield(self.task)


@asynccontextmanager
async def opened(endpoint: Node, engine: Engine, hosts: Sequence[Host]) -> AsyncIterator[Probes]:
    """Probes that the engine starts on these hosts."""
    topology, here = Topology.from_dict({"job": {"timeout": 10.0}}).with_hosts(tuple(hosts)), Path()
    async with gathered_hosts(engine, Gathering(topology, here, print), "token") as fleet:
        await fleet.open(endpoint, hosts, here, say=print, log=print, agents=False)
        async with Probes(endpoint, fleet, hosts, Timeouts.of(10.0)) as probes:
            yield probes


async def test_probes_measure_every_way_and_end() -> None:
    network = MemoryNetwork()
    engine = MemoryEngine(network)
    endpoint = network.endpoint("coordinator")
    hosts = [Host(name=name, slots=slots) for name, slots in (("a", 1), ("b", 2), ("c", 3))]
    async with opened(endpoint, Adapted(engine), hosts) as probes:
        await probes.start()
        links = [await probes.measure_way(*pair) for pair in pairs_of(["a", "b", "c"])]
        found = Links(tuple([await probes.measure_processor(host) for host in hosts]), tuple(links))
        await probes.end()
    await endpoint.close()
    assert [(link.source, link.target) for link in found.links] == pairs_of(["a", "b", "c"])
    assert all(link.bandwidth > 1e6 for link in found.links)
    assert all(0 < link.latency_s < 1 for link in found.links)
    assert [(host.name, host.flops) for host in found.hosts] == [("a", 1e9), ("b", 2e9), ("c", 3e9)]
    assert [row["row"] for row in found.rows()] == ["host"] * 3 + ["link"] * 6
    assert engine.stopped == 3


async def test_a_probe_that_ends_early_is_named() -> None:
    network = MemoryNetwork()
    endpoint = network.endpoint("coordinator")
    hosts = [Host(name=name, slots=1) for name in ("a", "b")]
    with pytest.raises(ZmqTrainError, match="probe on b ended with exit code 3"):
        async with opened(endpoint, Adapted(MemoryEngine(network, broken="b")), hosts) as probes:
            await probes.start()
    await endpoint.close()


async def test_a_probe_ends_when_nobody_is_left_who_asks() -> None:
    """Over ssh it is no child of the process that started it."""
    network = MemoryNetwork()
    asks, other, here = (network.endpoint(peer) for peer in ("coordinator", "agent/b", "agent/a"))
    probe = LinkProbe(here, patience_s=5.0)
    for endpoint in (asks, other):
        here.add_peer(endpoint.peer, endpoint.address)
        endpoint.serve("probe.here", _nothing)
        await here.request(endpoint.peer, "probe.here", timeout=5.0)
    here.forget("agent/b", "gone")
    assert not probe.ended.is_set()
    here.forget("coordinator", "gone")
    async with asyncio.timeout(5.0):
        await probe.ended.wait()
    for endpoint in (here, other, asks):
        await endpoint.close()


async def _nothing(_caller: str) -> None:
    return None


class Adapted:
    """The engine, with handles as engines have them."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> _Handle:
        return _Handle(await self._engine.start(host, command, environ))

    async def stop(self, handle: _Handle, grace: float) -> None:  # type: ignore[override]
        await self._engine.stop(handle.task, grace)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file has only one"),
        (
            '[[hosts]]\nname = "a"\nslots = 1\n[[hosts]]\nname = "b"\naddress = "10.0.0.9"\nslots = 1',
            r"b \(10.0.0.9\) is another.* set kind = .ssh.",
        ),
    ],
)
async def test_hosts_that_cannot_be_started_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        await measure_links(parse_topology('[job]\nname = "x"\n' + text), None, token="token")


def test_the_command_measures_between_processes_and_adds_to_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "job.toml", tmp_path / "profile.json"
    file.write_text('[job]\nname = "x"\n[[hosts]]\nname = "h[0-1]"\nslots = 1\n')
    out.write_text(json.dumps(Profile.load("lenet").to_values()))
    assert run_profile(str(file), links=True, out=out, json_lines=True) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["row"], row.get("name", row.get("source"))) for row in rows] == [
        ("host", "h0"),
        ("host", "h1"),
        ("link", "h0"),
        ("link", "h1"),
    ]
    profile = Profile.load(out)
    assert len(profile.known().links) == 2
    assert profile.layers == Profile.load("lenet").layers
