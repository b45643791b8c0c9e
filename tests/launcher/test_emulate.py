"""Emulated runs: real launches behind slow links, what the links are made of, and what a person gets wrong."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launcher.launched import Launched
from zmqtrain.errors import UsageError
from zmqtrain.launcher.emulate import Emulation, emulated, plan_of
from zmqtrain.launcher.namespaces import LEAST_BURST_BYTES, Namespaces, NoNamespacesError
from zmqtrain.net.shaping import LinkShape
from zmqtrain.topology.links import links_of
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology

HOSTS = """
[job]
name = "trial"
timeout = "12 s"
oversubscribe = true

[[hosts]]
name = "alpha"
address = "10.1.2.3"
slots = 1

[[hosts]]
name = "beta"
address = "10.1.2.4"
slots = 1

[compute]
group_size = 2
batch_size = 4
threads = 1
"""
SLOW = HOSTS + '[network]\nbandwidth = "1 Mbit/s"\nlatency = "1 ms"\n'

#: Sums this many bytes, of which each of the two sends as many: a half to be summed, and a half that it has summed.
NBYTES = 100_000
SUMS = f"""
import json, time, torch, zmqtrain
with zmqtrain.session() as session:
    session.barrier()
    start = time.monotonic()
    total = session.all_reduce(torch.ones({NBYTES} // 4))
    print(json.dumps({{"seconds": time.monotonic() - start, "sum": float(total.sum())}}))
"""
#: What the network takes for them. It counts a few headers, too, and need not be waited for to the last byte on both sides.
LEAST_S = 0.9 * NBYTES * 8 / 1e6


def launch(folder: Path, *options: str, file: str = SLOW, code: int = 0) -> Launched:
    (folder / "script.py").write_text(SUMS)
    (folder / "topology.toml").write_text(file)
    with Launched(folder, "--emulate", *options, "topology.toml", "script.py") as launched:
        assert launched.end() == code, repr(launched)
    return launched


def told(launched: Launched) -> list[dict[str, float]]:
    return [json.loads(line.partition("|")[2]) for line in launched.lines if line.startswith("worker/") and '"seconds"' in line]


def test_without_namespaces_links_are_paced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slow motion as well: the real time is so much longer, the reported one not."""
    monkeypatch.setenv("PATH", str(tmp_path))  # neither ip nor tc
    launched = launch(tmp_path, "--dilation", "2")
    said = [line for line in launched.lines if "emulated:" in line]
    assert len(said) == 1
    assert "paced" in said[0]
    assert "iproute2" in said[0]
    assert "2 times slower" in said[0]
    results = told(launched)
    assert len(results) == 2
    assert all(result["seconds"] >= 2 * LEAST_S for result in results)
    assert all(result["sum"] == 2 * NBYTES // 4 for result in results)
    summary = launched.json("summary.json")
    assert summary["world"] == "emulated"
    assert summary["shaping"] == "paced"
    assert summary["dilation"] == 2
    assert summary["seconds"] >= LEAST_S


def namespaces_or_skip() -> None:
    async def attempt() -> None:
        namespaces = Namespaces({"a": 1e6})
        try:
            await namespaces.open()
        finally:
            await namespaces.close()

    try:
        asyncio.run(attempt())
    except NoNamespacesError as error:
        pytest.skip(f"no namespaces here: {error}")


def test_a_loop_that_is_not_slow_is_refused(tmp_path: Path) -> None:
    """It would count the network's time in seconds of another length than all others."""
    (tmp_path / "script.py").write_text("""
import asyncio, zmqtrain
async def main():
    async with zmqtrain.join():
        pass
asyncio.run(main())
""")
    (tmp_path / "topology.toml").write_text(SLOW)
    with Launched(tmp_path, "--emulate", "--shaping", "paced", "--dilation", "2", "topology.toml", "script.py") as launched:
        assert launched.end() == 2
    assert "2 times as slow as real time, but this event loop is not" in launched.error_text


def test_namespaces_shape_links(tmp_path: Path) -> None:
    namespaces_or_skip()
    launched = launch(tmp_path, "--shaping", "namespaces")
    results = told(launched)
    assert len(results) == 2
    # The kernel's buckets of tokens, one each way, let their first bytes through at once.
    assert all(result["seconds"] >= LEAST_S - 2 * LEAST_BURST_BYTES * 8 / 1e6 > 0 for result in results)
    assert all(result["sum"] == 2 * NBYTES // 4 for result in results)
    assert launched.json("summary.json")["shaping"] == "namespaces"
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"zt{launched.pid}-")]


async def test_what_killed_runs_have_left_is_removed() -> None:
    await asyncio.to_thread(namespaces_or_skip)
    dead = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await dead.wait()
    left = f"zt{dead.pid}-0"
    subprocess.run(["ip", "netns", "add", left], check=True)  # noqa: ASYNC221 - takes no time
    foreign = f"other{dead.pid}"
    subprocess.run(["ip", "netns", "add", foreign], check=True)  # noqa: ASYNC221
    namespaces = Namespaces({"a": None, "b": 1e6})
    try:
        await namespaces.open()
        listed = os.listdir("/run/netns")
        assert left not in listed
        assert foreign in listed
        assert namespaces.namespace_of("b") in listed
    finally:
        await namespaces.close()
        subprocess.run(["ip", "netns", "del", foreign], check=True)  # noqa: ASYNC221
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"zt{os.getpid()}")]


async def test_folders_of_killed_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    topology = parse_topology(SLOW)
    left, foreign = tmp_path / "zmqtrain-emulated-left", tmp_path / "zmqtrain-emulated-foreign"
    left.mkdir()
    foreign.mkdir()  # without the mark of a run: somebody else's, or a run's that is only beginning
    (left / "alive").touch()
    async with emulated(topology, place(topology), Emulation("paced")) as (first, _):
        async with emulated(topology, place(topology), Emulation("paced")):
            assert first.plan.exists()
        assert set(os.listdir(tmp_path)) == {foreign.name, first.plan.parent.name}
    assert os.listdir(tmp_path) == [foreign.name]


# The plan -----------------------------------------------------------------------------------------------------------------------


def parsed(network: str, hosts: int = 4) -> Topology:
    return parse_topology(f'[job]\nsteps = 1\n[[hosts]]\nname = "h[1-{hosts}]"\nslots = 1\n[network]\n{network}')


def test_every_host_has_a_nic_each_way() -> None:
    plan = plan_of(links_of(parsed('bandwidth = "8 Mbit/s"\nlatency = "1 ms"', hosts=2)), {})
    assert plan.ways["h1", "h2"] == LinkShape((0, 3), 0.001)
    assert plan.ways["h2", "h1"] == LinkShape((1, 2), 0.001)
    assert list(plan.rates) == [1e6] * 4


def test_namespaces_leave_latency_to_the_endpoints() -> None:
    plan = plan_of(links_of(parsed('bandwidth = "8 Mbit/s"\nlatency = "1 ms"', hosts=2)), {}, nics=False)
    assert plan.ways["h1", "h2"] == LinkShape((), 0.001)
    assert not plan.rates


def test_racks_and_rules_for_links_are_on_the_way() -> None:
    text = """
    latency = "1 ms"
    hosts = [{ name = "h2", bandwidth = "80 Mbit/s", latency = "2 ms" }]
    racks = [{ name = "one", hosts = ["h1", "h2"], uplink = "8 Mbit/s", latency = "3 ms" }]
    links = [{ from = "h1", to = "h3", bandwidth = "16 Mbit/s" }, { from = "h4", to = "h1", down = true }]
    """
    plan = plan_of(links_of(parsed(text)), {})

    def rates(source: str, target: str) -> list[float]:
        return [plan.rates[nic] for nic in plan.ways[source, target].nics]

    assert rates("h1", "h2") == [10e6]  # within the rack: only the NIC of h2
    assert rates("h1", "h3") == [1e6, 2e6]
    assert rates("h2", "h4") == [10e6, 1e6]
    assert rates("h3", "h2") == [1e6, 10e6]
    assert rates("h3", "h4") == []
    assert plan.ways["h2", "h3"].latency_s == pytest.approx(0.006)
    assert plan.ways["h4", "h1"].down
    # What leaves a rack and what enters it have nothing to do with each other.
    assert not set(plan.ways["h2", "h4"].nics) & set(plan.ways["h3", "h2"].nics)


# Bad input ----------------------------------------------------------------------------------------------------------------------


def test_a_network_must_be_given(tmp_path: Path) -> None:
    for file in (HOSTS, HOSTS + "[network]\ndilation = 3\n"):
        folder = tmp_path / str(len(file))
        folder.mkdir()
        launched = launch(folder, file=file, code=2)
        assert "there is no network to emulate" in launched.error_text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shaping", "paced"], "add --emulate"),
        (["--dilation", "4"], "--dilation is only for emulated runs"),
        (["--emulate", "--shaping", "magic"], "must be one of auto, namespaces, paced"),
        (["--emulate", "--dilation", "0.5"], "dilation"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: list[str], words: str) -> None:
    (tmp_path / "topology.toml").write_text(SLOW)
    (tmp_path / "script.py").write_text("")
    with Launched(tmp_path, *options, "topology.toml", "script.py") as launched:
        assert launched.end() == 2
    assert words in launched.error_text


def test_namespaces_do_not_know_racks() -> None:
    topology = parsed('racks = [{ name = "one", hosts = ["h1"], uplink = "8 Mbit/s" }]')
    Emulation().check(topology)
    with pytest.raises(UsageError, match="cannot shape racks"):
        Emulation("namespaces").check(topology)


async def test_auto_says_why_links_are_paced() -> None:
    topology = parsed('racks = [{ name = "one", hosts = ["h1"], uplink = "8 Mbit/s" }]\njitter = "1 ms"')
    async with emulated(topology, place(topology), Emulation()) as (engine, said):
        assert engine.kind == "paced"
        assert "cannot shape racks" in said
        assert "jitter and loss are simulated only" in said
        assert engine.plan.is_file()
    assert not engine.plan.exists()


async def test_namespaces_that_cannot_be_had_are_an_error_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("ip") is None
    topology = parsed('bandwidth = "8 Mbit/s"')
    with pytest.raises(UsageError, match="--shaping namespaces: there is no ip and no tc here"):
        async with emulated(topology, place(topology), Emulation("namespaces")):
            pass
