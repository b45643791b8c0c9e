"""``zmqtrain simulate``, as a person calls it."""

from __future__ import annotations

import json
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.simulate.worlds import profile_file, topology_of
from zmqtrain.cli.simulate import BROKEN, run_simulate
from zmqtrain.errors import TopologyError, UsageError
from zmqtrain.run.preemption import INTERRUPTED
from zmqtrain.server.shard import TensorEntry
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.schema import Topology

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(topology_of(profile_file(tmp_path)).to_toml())
    return path


def test_a_run_leaves_what_a_real_one_leaves(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_simulate(file, run_dir=tmp_path / "run") == 0
    shown = capsys.readouterr().out
    assert "simulated: test: 4 groups of 1 worker, 2 model servers (async) on 4 hosts" in shown
    assert "virtual seconds (seed 1) took" in shown
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} == {
        "topology.toml", "summary.json", "events.jsonl", "trace.json", "logs", "checkpoints"
    }  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["world"], summary["status"], summary["exit_code"], summary["seed"]) == ("simulated", "done", 0, 1)
    assert summary["steps"] == 12
    assert summary["step_s"]["median"] > 0.03
    trace = json.loads((run / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert names == {*(f"worker/{rank}" for rank in range(4)), "server/0", "server/1"}
    assert any(event["name"] == "backward" for event in trace)


def test_a_run_that_a_sink_refuses_leaves_nothing(file: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ['observe.to=["prometheus", "csv"]', f"observe.options.prometheus.port={port}"]
        with pytest.raises(UsageError, match=rf"port {port}"):
            run_simulate(file, run_dir=tmp_path / "run", settings=settings)
    assert not (tmp_path / "run").exists()


def test_json_is_json_only(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_simulate(file, json_lines=True, run_dir=tmp_path / "run") == 0
    for line in capsys.readouterr().out.splitlines():
        json.loads(line)


def test_sigterm_interrupts_it_and_says_how_far_it_came(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(topology: Topology, *, seed: int, options: Options) -> Any:
        def on_report(peer: str, events: list[dict[str, Any]]) -> None:
            assert options.on_report is not None
            options.on_report(peer, events)
            if any(event["step"] == 5 for event in events):
                signal.raise_signal(signal.SIGTERM)

        return simulate(topology, seed=seed, options=replace(options, on_report=on_report))

    monkeypatch.setattr("zmqtrain.cli.simulate.simulate", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert run_simulate(file, run_dir=tmp_path / "run") == INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) == before
    assert "interrupted after" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 0.1 < summary["seconds"] < 10


def test_a_failing_run_says_whose_fault_it_is(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = file.read_text().replace("[job]\n", "[job]\nelastic = false\n", 1)
    text += '\n[[faults]]\nkind = "kill"\ntarget = "worker/2"\nat = "200 ms"\n'
    file.write_text(text)
    assert run_simulate(file, run_dir=tmp_path / "run") == 128 + 9
    captured = capsys.readouterr()
    assert "worker/2 on h3 was killed by SIGKILL" in captured.err
    assert "fault: kill worker/2 at 0.2 s" in captured.out
    assert json.loads((tmp_path / "run" / "error.json").read_text())["verdict"] == "host lost"


def test_many_seeds(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_simulate(file, seeds=3, seed=10, faults="random", jobs=1) == 0
    assert "3 seeds in" in (shown := capsys.readouterr().out)
    assert "0 broke an invariant" in shown
    assert run_simulate(file, seeds=2, faults="none", jobs=1, json_lines=True) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["seed"], line["status"], line["broken"]) for line in lines] == [(1, "done", []), (2, "done", [])]


def test_seeds_in_processes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_simulate(file, seeds=2, faults="file", jobs=2) == 0
    assert "2 seeds in" in capsys.readouterr().out


def test_a_seed_that_breaks_is_named(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    update = TensorEntry.update

    def forgets(self: TensorEntry, *args: object) -> None:
        update(self, *args)  # type: ignore[arg-type]
        self.version += self.version == 5

    monkeypatch.setattr(TensorEntry, "update", forgets)
    assert run_simulate(file, seeds=1, seed=3, jobs=1) == BROKEN
    captured = capsys.readouterr()
    assert "seed 3" in captured.out
    assert "broken: server/" in captured.out
    assert f"can be replayed with: zmqtrain simulate {file} --faults file --seed 3" in captured.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('device = "modelled"', 'device = "cpu"'), "profile is for modelled devices"),
        (('bandwidth = "1 Gbit/s"', 'bandwidth = "-1 Gbit/s"'), "bandwidth"),
        (('latency = "200 us"', 'latency = "3 weeks"'), "unknown unit"),
        (("[observe]", '[[faults]]\nkind = "kill"\ntarget = "wroker/2"\nat = 1.0\n[observe]'), "wroker/2"),
        (("[observe]", '[[faults]]\nkind = "kill"\ntarget = "worker/9"\nat = 1.0\n[observe]'), "worker/9"),
    ],
    ids=["device", "bandwidth", "latency", "typo", "no such worker"],
)
def test_bad_files(file: Path, tmp_path: Path, change: tuple[str, str], message: str) -> None:
    text = file.read_text()
    assert change[0] in text
    file.write_text(text.replace(*change))
    with pytest.raises(TopologyError, match=message):
        run_simulate(file, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bad_options(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--faults many: must be one of file, random, none"):
        run_simulate(file, faults="many")
    empty = tmp_path / "empty.toml"
    empty.write_text('[job]\nname = "nothing"\n')
    with pytest.raises(UsageError, match="names no task"):
        run_simulate(empty)
    with pytest.raises(UsageError, match=r"no profile of this name is shipped.*Did you mean 'resnet50'"):
        run_simulate(file, settings=['compute.profile="resnet"'])


@pytest.mark.parametrize("name", ["simulate-faults", "simulate-quadratic", "simulate-digits", "simulate-64"])
def test_the_shipped_files_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = {
        "simulate-64": ["job.steps=1", "compute.groups=2", "compute.group_size=8", "exchange.shards=8"],
        "simulate-digits": ["job.steps=20"],
    }.get(name, [])
    assert run_simulate(ROOT / "launch" / f"{name}.toml", run_dir=tmp_path / "run", settings=settings) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["broken"] == []
    assert summary["eval"] or name in ("simulate-faults", "simulate-64")
