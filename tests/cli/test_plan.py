"""``zmqtrain plan``, as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.cli import plan_verify
from zmqtrain.cli.plan import run_plan
from zmqtrain.errors import DifferentModelError, TaskError, TopologyError, UsageError
from zmqtrain.testing.threads import run_ranks

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "launch" / "alexnet-study.toml"
TASK = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset
from zmqtrain import Task

def task(fails=False):
    data = TensorDataset(torch.zeros(6, 3, 16, 16), torch.zeros(6, dtype=torch.long))
    model = lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(13 if fails else 512, 4),
    )
    return Task(model=model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), train_data=data)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(TASK)
    path = tmp_path / "job.toml"
    path.write_text(
        f'[job]\ntask = "work.py:task"\npython_path = ["{tmp_path}"]\n[[hosts]]\nname = "h[1-4]"\naddress = "h[1-4]"\nslots = 1\n'
        '[compute]\ngroup_size = 4\nbatch_size = 32\n[network]\nbandwidth = "1 Gbit/s"\nlatency = "100 us"\n'
    )
    return path


def rows(capsys: pytest.CaptureFixture[str], kind: str | None = None) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [row for row in found if kind in (None, row["row"])]


def test_the_table_of_layers_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(STUDY, json_lines=True) == 0
    found = rows(capsys)
    totals = {(row["processes"], row["plan"]): row for row in found if row["row"] == "total"}
    assert round(totals[512, "pure batch"]["communication_s"] * 1e3, 2) == 83.28
    assert totals[512, "pure model"]["obstacle"] == "model 512x1 of conv1: there would be more rows than its 96 outputs"
    layers = [row for row in found if row["row"] == "layer"]
    assert len(layers) == 4 * 8
    for row in layers:
        (chosen,) = [each for each in row["alternatives"] if each["choice"] == row["choice"]]
        assert chosen["grid"] == row["grid"]
        assert chosen["seconds"] == min(each["seconds"] for each in row["alternatives"])


def test_the_table_of_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(STUDY, processes="512") == 0
    shown = capsys.readouterr().out
    assert "the table alexnet: 62,367,776 weights" in shown
    assert "priced by the paper's equations" in shown
    assert "Plan for 512 processes and a batch of 2048" in shown


def test_a_task_s_model(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(file) == 0
    shown = capsys.readouterr().out
    assert "the model of work.py:task: 2,292 weights" in shown
    assert "what this runtime sends, with 1 of the group's processes on each host: 250 us per message, 1 Gbit/s" in shown
    assert "domain" in shown
    assert "its input is not an image" in shown
    assert run_plan(file, json_lines=True) == 0
    found = rows(capsys)
    assert [row["layer"] for row in found if row["row"] == "layer"] == ["0", "5"]
    assert found[0]["alpha_s"] == pytest.approx(250e-6)
    assert found[0]["bandwidth"] == pytest.approx(1e9)
    planned, batch, model = (row for row in found if row["row"] == "total")
    assert planned["step_s"] <= min(batch["step_s"], model["step_s"])
    assert planned["latency_s"] + planned["volume_s"] == pytest.approx(planned["communication_s"])


def test_one_process_has_no_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(ROOT / "launch" / "simulate-64.toml", processes="1") == 0
    said = capsys.readouterr().out
    assert "One process computes all layers: " in said
    assert "What each layer would cost" not in said


def test_a_profile_and_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["compute.profile=lenet", "compute.batch_size=2048", "compute.group_size=8"]
    steps = []
    for overlap in ("none", "0.5", "perfect"):
        more = [*settings, f"plan.overlap={overlap}"]
        assert run_plan(ROOT / "launch" / "simulate-64.toml", json_lines=True, settings=more) == 0
        (planned,) = (row for row in rows(capsys, "total") if row["plan"] == "planned")
        steps.append(planned["step_s"])
        assert planned["exposed_s"] <= planned["communication_s"] * (1 + 1e-9)
    assert steps[0] > steps[1] > steps[2]


def test_several_sizes_and_a_sweep(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(file, json_lines=True, processes="2,4", batches="32,64") == 0
    assert [(row["processes"], row["batch"]) for row in rows(capsys, "total")][::3] == [(2, 32), (2, 64), (4, 32), (4, 64)]
    assert run_plan(file, json_lines=True, sweep_it=True) == 0
    found = rows(capsys, "sweep")
    assert [row["scaling"] for row in found] == ["strong"] * 3 + ["weak"] * 3 + ["beyond"] * 4
    assert run_plan(file, sweep_it=True) == 0
    shown = capsys.readouterr().out
    assert "Beyond the batch size" in shown


def test_a_plan_is_saved_priced_and_drawn(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, chart = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert run_plan(file, json_lines=True, save=saved, plot=chart) == 0
    before = rows(capsys, "total")[0]
    assert chart.read_text().startswith("<svg")
    assert run_plan(file, json_lines=True, given=saved) == 0
    again = rows(capsys, "total")[0]
    assert (again["plan"], again["step_s"]) == ("given", before["step_s"])
    worse = [{"layer": "0", "choice": "domain", "grid": "4x1"}, {"layer": "5", "choice": "model", "grid": "2x2"}]
    saved.write_text(json.dumps(worse))
    assert run_plan(file, json_lines=True, given=saved) == 0
    assert rows(capsys, "total")[0]["step_s"] >= before["step_s"]
    assert run_plan(file, given=saved) == 0
    assert "The given plan for 4 processes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("[", "cannot be read as a plan"),
        ('{"layer": "0"}', "not a plan, which is a list"),
        ('[{"layer": "0", "choice": "model", "grid": "4x1"}]', "another model.*has no entry for 5"),
        ('[{"layer": "0", "choice": "best", "grid": "4x1"}]', "'best' is none of"),
        ('[{"layer": "0", "choice": "batch", "grid": "1x4"}, {"layer": "5", "choice": "model", "grid": "4"}]', "'4' is no grid"),
        ('[{"layer": "0", "choice": "batch", "grid": "1x2"}, {"layer": "5", "choice": "batch", "grid": "1x2"}]', "for 2 processes"),
    ],
)
def test_bad_plans(file: Path, tmp_path: Path, plan: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(plan)
    with pytest.raises(UsageError, match=message):
        run_plan(file, given=tmp_path / "plan.json")


def test_bad_input(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"--plot chart.png: charts are written as SVG"):
        run_plan(file, plot=Path("chart.png"))
    with pytest.raises(UsageError, match=r"--plot .* cannot be written"):
        run_plan(file, plot=tmp_path / "missing" / "chart.svg")
    for text in ("0", "two", "4,,8", ""):
        with pytest.raises(UsageError, match=r"--processes .*: write whole numbers from 1"):
            run_plan(file, processes=text)
    with pytest.raises(UsageError, match="one group size and one batch"):
        run_plan(file, processes="2,4", save=tmp_path / "plan.json")
    with pytest.raises(UsageError, match=r"--price .* cannot be read"):
        run_plan(file, given=tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"no grid of 61 processes divides any layer for a batch of 2"):
        run_plan(file, processes="61", batches="2")
    with pytest.raises(UsageError, match=r"no plan fits in memory: a process needs at least .* may use only 1 MiB"):
        run_plan(file, settings=["plan.memory=1 MiB"], batches="4096")
    with pytest.raises(TaskError, match=r"cannot be traced: the forward of Sequential raised RuntimeError"):
        run_plan(file, settings=["job.args={ fails = true }"])
    with pytest.raises(UsageError, match=r"there is no such table of layers.*did you mean 'alexnet'"):
        run_plan(file, settings=["plan.layers=alexnt"])
    with pytest.raises(TopologyError, match=r'must be "none", "perfect", or a number from 0 to 1'):
        run_plan(file, settings=["plan.overlap=2"])
    empty = tmp_path / "empty.toml"
    empty.write_text("[job]\n")
    with pytest.raises(UsageError, match="no model to plan for"):
        run_plan(empty)
    assert capsys.readouterr().out.count("Plan for") == 0


def test_verify_compares_the_planned_model_with_the_ordinary_one(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(file, json_lines=True, verify=True) == 0
    (row,) = rows(capsys, "verified")
    assert row["precision"] == "float64"
    assert run_plan(file, verify=True) == 0
    assert "are the ordinary model's" in capsys.readouterr().out


def test_verify_waits_while_one_thread_runs_the_ordinary_model(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []

    def noted(*given: Any, **named: Any) -> Any:
        limits.append(named["timeout_s"])
        return run_ranks(*given, **named)

    monkeypatch.setattr(plan_verify, "run_ranks", noted)
    assert run_plan(file, json_lines=True, verify=True) == 0
    assert limits == [None]


def test_verify_refuses_an_optimizer_that_looks_at_whole_parameters(file: Path, tmp_path: Path) -> None:
    work = tmp_path / "work.py"
    work.write_text(TASK.replace("torch.optim.SGD(p, 0.1)", "torch.optim.Adafactor(p)"))
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps([{"layer": "0", "choice": "batch", "grid": "4x1"}, {"layer": "5", "choice": "model", "grid": "4x1"}])
    )
    with pytest.raises(DifferentModelError, match="the optimizer Adafactor updates parts of a parameter other than the whole"):
        run_plan(file, given=plan, verify=True)


def test_verify_is_for_the_files_own_group(file: Path) -> None:
    with pytest.raises(UsageError, match="--verify compares the model of"):
        run_plan(file, processes="2", verify=True)
