"""Each sink with its real library: what was given to it is what the library reads back."""

from __future__ import annotations

import csv
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from zmqtrain.errors import UsageError
from zmqtrain.observe.sinks.base import RunFacts
from zmqtrain.observe.sinks.fan_out import FanOut
from zmqtrain.observe.sinks.prometheus import PrometheusSink


def event(kind: str, step: int | None = None, rank: int = 0, **values: Any) -> dict[str, Any]:
    return {"time": 100.0 + (step or 0), "host": "a", "role": "worker", "rank": rank, "step": step, "kind": kind, "values": values}


STEPS = [
    event("join", peer="worker/0"),
    *(event("step", step, loss=1.0 / (1 + step), samples=4, seconds=0.5, compute_s=0.4) for step in range(3)),
    event("eval", 3, eval_accuracy=0.75, seconds=0.1),
]


def through(name: str, run: Path, options: Mapping[str, Any] | None = None) -> None:
    """A short run's figures, given to a sink as a launcher does."""
    sinks = FanOut([name], {name: options or {}})
    (begun,) = sinks.begin(RunFacts("job", run, "real", {"job": {"name": "job", "steps": 3}, "hosts": [{"name": "a"}]}))
    begun.result(PATIENCE_S)
    for each in STEPS:
        sinks.take(each)
    assert not sinks.end("done", {"status": "done", "exit_code": 0}, timeout_s=PATIENCE_S)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "job-001").mkdir()
    return tmp_path / "job-001"


def test_csv(run: Path) -> None:
    through("csv", run)
    through("csv", run)  # a run that continues: one header
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], float(row["value"])) for row in rows if row["name"] == "train/loss"][:3] == [
        ("0", 1.0), ("1", 0.5), ("2", 1 / 3),
    ]  # fmt: skip
    assert [(row["step"], row["value"]) for row in rows if row["name"] == "eval/accuracy"] == [("3", "0.75")] * 2


def test_prometheus(run: Path) -> None:
    sink = PrometheusSink()
    sink.begin(RunFacts("job", run, "real", {}, {"port": 0}))
    try:
        sink.events([*STEPS, event("lost", rank=1, peer="worker/1"), {**event("join", peer="server/0"), "role": "server"}])
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
    finally:
        sink.end("done", {})
    labels = '{host="a",run="job-001",worker="worker/0"}'
    for line in (
        f"zmqtrain_worker_steps_total{labels} 3.0",
        f"zmqtrain_worker_samples_total{labels} 12.0",
        f"zmqtrain_worker_step_seconds_count{labels} 3.0",
        f"zmqtrain_worker_step{labels} 2.0",
        'zmqtrain_evaluation{metric="accuracy",run="job-001"} 0.75',
        'zmqtrain_members{role="worker",run="job-001"} 1.0',
        'zmqtrain_members_lost_total{role="server",run="job-001"} 0.0',
        'zmqtrain_members_lost_total{role="worker",run="job-001"} 1.0',
    ):
        assert line in text.splitlines(), f"{line} is not in\n{text}"


def test_the_grafana_board_asks_for_series_that_there_are(run: Path) -> None:
    import json
    import re

    sink = PrometheusSink()
    sink.begin(RunFacts("job", run, "real", {}, {"port": 0}))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=PATIENCE_S) as answer:
            there = set(re.findall(r"^# TYPE (\w+)", answer.read().decode(), re.MULTILINE))
    finally:
        sink.end("done", {})
    board = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
    asked = {
        name for panel in board["panels"] for target in panel["targets"] for name in re.findall(r"zmqtrain_\w+", target["expr"])
    }
    assert asked
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked} <= there


def test_a_port_that_is_taken_is_refused(run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"cannot be served on 127.0.0.1 port {port}: .*; 0 chooses a free one"):
            PrometheusSink().begin(RunFacts("job", run, "real", {}, {"port": port}))


def test_tensorboard(run: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs pip install 'zmqtrain[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    through("tensorboard", run)
    there = EventAccumulator(str(run / "tensorboard")).Reload()
    found = [(each.step, make_ndarray(each.tensor_proto).item()) for each in there.Tensors("train/loss")]
    assert found == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))]
    assert make_ndarray(there.Tensors("eval/accuracy")[0].tensor_proto).item() == 0.75


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_mlflow(run: Path, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs pip install 'zmqtrain[mlflow]'")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    through("mlflow", run, {"tracking_uri": uri, "experiment": "digits"})
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (found.info.run_name, found.info.status) == ("job-001", "FINISHED")
    assert found.data.params["job.steps"] == "3"
    assert [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, "train/loss")] == [
        (0, 1.0), (1, 0.5), (2, 1 / 3),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_wandb_offline(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs pip install 'zmqtrain[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    through("wandb", run, {"mode": "offline"})
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    data, at, losses = file.read_bytes(), 7, []
    while at < len(data):  # records of LevelDB's log, whose header is checksum, size and type
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        record = Record.FromString(data[at + 7 : at + 7 + size])
        losses += [float(item.value_json) for item in record.history.item if "train/loss" in (item.key, *item.nested_key)]
        at += 7 + size
    assert losses == [1.0, 0.5, pytest.approx(1 / 3)]


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_wandb_without_a_key_is_refused_before_the_start(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs pip install 'zmqtrain[wandb]'")
    from zmqtrain.observe.sinks.wandb import WandbSink

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(run / "none"))
    with pytest.raises(UsageError, match="wandb has no API key"):
        WandbSink().begin(RunFacts("job", run, "real", {}))
