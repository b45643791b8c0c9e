"""Whole simulated runs: they end as real ones do, and repeat."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.simulate.worlds import profile_file, topology_of
from zmqtrain.cli.simulate import run_simulate
from zmqtrain.errors import DeadlockError, TimeLimitError, UsageError
from zmqtrain.membership.client import Membership
from zmqtrain.run.faults import Fault, corrupt, drop, heal, kill, partition, pause, restart, slow
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.schema import Topology


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return profile_file(tmp_path)


def run(topology: Topology, *faults: Fault, **more: Any) -> tuple[Result, list[str]]:
    """The result, and everything that was told of the run, as lines."""
    lines: list[str] = []
    result = simulate(
        topology,
        options=Options(
            faults=faults or None,
            on_event=lambda kind, values: lines.append(json.dumps([kind, values])),
            on_report=lambda peer, events: lines.extend(json.dumps([peer, event]) for event in events),
            **more,
        ),
    )
    return result, lines


EXCHANGES: list[dict[str, Any]] = [
    {"exchange": {"staleness": "async"}},
    {"exchange": {"staleness": "sync"}},
    {"exchange": {"staleness": {"bound": 2}}},
    {"exchange": {"staleness": "sync", "snapshot": True}},
    {"exchange": {"kind": "allreduce", "staleness": "async", "shards": 1}},
    {"exchange": {"kind": "averaging", "staleness": "async", "shards": 1, "every": 3}},
    {"compute": {"groups": 2, "group_size": 2}},
]


@pytest.mark.parametrize("payload", ["phantom", "small", "real"])
@pytest.mark.parametrize("sections", EXCHANGES, ids=["async", "sync", "bound", "snapshot", "allreduce", "averaging", "groups"])
def test_every_exchange_and_payload(profile: str, sections: dict[str, Any], payload: str) -> None:
    result, lines = run(topology_of(profile, simulation={"payload": payload}, **sections))
    assert result.ending.status == "done", result.ending.error
    assert result.broken == []
    steps = [json.loads(line)[1] for line in lines if '"kind": "step"' in line]
    assert len(steps) == 12 * 4
    # Nothing is faster than the devices.
    assert result.seconds > 12 * 0.03 * (0.5 if "compute" in sections else 1.0)


def test_a_seed_repeats_and_another_differs(profile: str) -> None:
    topology = topology_of(profile, compute={"noise": {"kind": "exponential"}}, network={"jitter": "100 us", "loss": 0.001})
    schedule = (drop("worker/1", at=0.2), pause("server/0", 0.5, step=4))
    first, again = (run(topology, *schedule) for _ in range(2))
    assert first[1] == again[1]
    assert first[0].callbacks == again[0].callbacks
    assert run(topology, *schedule, debug=True)[1] == first[1]
    other = simulate(topology, seed=7)
    assert other.seconds != first[0].seconds


def test_the_same_bytes_in_every_process(tmp_path: Path, profile: str) -> None:
    """Python's hashes differ from process to process, and no order may depend on them; nor on debug mode, nor on uvloop."""
    file = tmp_path / "job.toml"
    topology = topology_of(
        profile, compute={"noise": {"kind": "normal"}}, faults=[{"kind": "drop", "target": "worker/0", "at": 0.1}]
    )
    file.write_text(topology.to_toml())
    written = []
    for name in ("here", "there"):
        if name == "here":
            assert run_simulate(file, run_dir=tmp_path / name) == 0
        else:
            without_uvloop = "import sys; sys.modules['uvloop'] = None; from zmqtrain.cli.main import main; main()"
            command = [sys.executable, "-X", "dev", "-c", without_uvloop, "simulate", str(file), "--run-dir", str(tmp_path / name)]
            environ = {"PYTHONHASHSEED": "77", "PATH": ""}
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        written.append([(tmp_path / name / each).read_bytes() for each in ("events.jsonl", "trace.json")])
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["world"] == "simulated"
        assert summary["status"] == "done"
        assert summary["steps"] == 12
    assert written[0] == written[1]


class TestFaults:
    """What goes wrong, and how the run takes it."""

    @pytest.mark.parametrize(
        ("faults", "staleness"),
        [
            ([drop("worker/1", at=0.1), drop("server/0", "worker/2", at=0.2)], "async"),
            ([drop("worker/1", at=0.1), drop("server/0", "worker/2", at=0.2)], "sync"),
            ([pause("worker/3", 2.0, step=3)], "async"),
            ([pause("h2", 3.0, at=0.15)], "sync"),
            ([slow("worker/0", 5.0, step=2)], "sync"),
            ([slow("h1", 3.0, at=0.1, lasts=0.2)], "async"),
            ([partition(["h1", "h2"], ["h3", "h4"], at=0.1, lasts=1.0)], "async"),
            ([partition(["h1"], ["h2", "h3", "h4"], at=0.1, lasts=4.0)], "sync"),
            ([partition(["h1"], ["h2"], at=0.1, one_way=True), heal(at=3.0)], "async"),
        ],
        ids=lambda value: value if isinstance(value, str) else " ".join(fault.kind for fault in value),
    )
    def test_survived(self, profile: str, faults: list[Fault], staleness: str) -> None:
        result, _ = run(topology_of(profile, exchange={"staleness": staleness}), *faults)
        assert result.ending.status == "done", result.ending.error
        assert result.broken == []
        assert len(result.faults) == len(faults)

    @pytest.mark.parametrize(
        ("fault", "type_", "message"),
        [
            (kill("worker/1", step=3), "HostLostError", "worker/1 on h2 was killed by SIGKILL"),
            (kill("server/0", at=0.2), "HostLostError", "server/0 on .* was killed by SIGKILL"),
            (kill("h3", at=0.2), "HostLostError", "lost the host h3: its agent has been silent for 8 s"),
            (restart("worker/2", at=0.2), "HostLostError", "worker/2 on h3 was killed by SIGKILL"),
            (pause("h2", 30.0, at=0.2), "HostLostError", "lost the host h2: its agent has been silent"),
            (partition(["h4"], ["h1", "h2", "h3"], at=0.1), "HostLostError", "lost the host h4"),
        ],
        ids=["kill", "kill server", "kill host", "restart", "long pause", "partition"],
    )
    def test_the_run_fails_in_order_and_says_why(self, profile: str, fault: Fault, type_: str, message: str) -> None:
        result, _ = run(topology_of(profile, job={"steps": 400, "elastic": False}), fault)
        assert result.broken == []
        assert result.ending.status == "failed"
        assert result.ending.exit_code >= 128
        assert result.ending.error is not None
        assert result.ending.error["type"] == type_
        assert re.search(message, result.ending.error["message"])

    def test_a_flipped_bit_ends_nobodys_process_but_the_run(self, profile: str) -> None:
        result, lines = run(topology_of(profile, job={"steps": 100}), corrupt("worker/1", "server/0", step=3))
        assert result.broken == []
        if result.ending.status != "done":  # a bit of a tensor passes unseen
            assert any("closes the link" in line for line in lines)

    def test_the_files_schedule_and_its_ranges(self, profile: str) -> None:
        faults = [
            {"kind": "partition", "at": "100 ms", "sides": [["h[1-2]"], ["h[3-4]"]], "lasts": "1 s"},
            {"kind": "slow", "step": 2, "target": "worker/1", "factor": 2.0},
        ]
        result, _ = run(topology_of(profile, faults=faults))
        assert result.ending.status == "done"
        assert [str(fault) for fault in result.faults] == [
            "slow worker/1 2 times at step 2 of worker/1",
            "partition h1,h2 | h3,h4 at 0.1 s for 1 s",
        ]


def test_slow_links_make_a_slow_run(profile: str) -> None:
    """Phantoms of 20,000 parameters: 80 kB there and back, from four workers to a server on one's host."""
    seconds = []
    for bandwidth in ("100 Mbit/s", "10 Mbit/s"):
        sections = {"network": {"bandwidth": bandwidth}, "exchange": {"shards": 1, "staleness": "sync"}}
        result, _ = run(topology_of(profile, simulation={"payload": "phantom"}, **sections))
        assert result.ending.status == "done"
        seconds.append(result.seconds)
    assert seconds[1] > seconds[0]
    # 12 steps of 4 times 80 kB in each direction over one NIC of 10 Mbit/s, but for what does not leave its host
    assert seconds[1] > 12 * 3 * 80e3 * 8 / 10e6


def test_between_hosts_a_small_model_travels_while_backward_runs() -> None:
    """And not in one bucket, which would leave when backward has ended."""
    own: dict[str, Any] = {"groups": 1, "group_size": 2, "batch_size": 400, "device": "modelled", "profile": "cifarnet"}
    common: dict[str, Any] = {
        **{"job": {"steps": 5}, "hosts": [{"name": "a", "slots": 1}, {"name": "b", "slots": 1}]},
        **{"exchange": {"kind": "allreduce"}, "network": {"bandwidth": "1 Gbit/s", "latency": "100 us"}},
    }
    seconds = [
        simulate(Topology.model_validate({**common, "compute": {**own, **more}})).seconds for more in ({}, {"bucket_size": "4 MiB"})
    ]
    assert seconds[0] < 0.9 * seconds[1]


def test_a_run_that_takes_too_long(profile: str) -> None:
    with pytest.raises(TimeLimitError, match=r"not done after 0\.2 virtual seconds.*\n.*waits for"):
        simulate(topology_of(profile, simulation={"time_limit": 0.2}))


def test_a_deadlock_says_what_each_role_waits_for(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If everybody waited without a time-out, the report would name all of them."""

    async def never(self: Membership, name: str, members: object = None) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Membership, "barrier", never)
    topology = topology_of(profile, simulation={"time_limit": 100}, job={"elastic": False})
    with pytest.raises((DeadlockError, TimeLimitError)) as caught:
        simulate(topology)
    for rank in range(4):
        assert f"worker/{rank} waits for" in str(caught.value)


def test_a_profile_of_another_model(tmp_path: Path) -> None:
    profile = profile_file(tmp_path)
    topology = Topology.from_dict(
        {
            "job": {"task": "examples/digits.py:task", "steps": 2},
            "compute": {"device": "modelled", "profile": profile},
            "simulation": {"payload": "real"},
        }
    )
    result = simulate(topology)
    assert result.ending.status == "failed"
    assert result.ending.error is not None
    assert "describes another model than the task's" in result.ending.error["message"]
    assert result.ending.exit_code == UsageError.exit_code
