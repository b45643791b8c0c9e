"""A measured profile fits its task, is read back as it was, and drives modelled devices and planners."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.train.world import run, topology_of
from zmqtrain import Task
from zmqtrain.cli.profile import run_profile
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.plan.measure.model import ModelBench, Steps, products
from zmqtrain.plan.measure.peak import threads
from zmqtrain.plan.measure.profile import Asked, profile_task
from zmqtrain.plan.measure.timing import Patience, Times
from zmqtrain.plan.profiled import with_times
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.train.device.profile import Profile

CPU = torch.device("cpu")
QUICK = Patience(0.0, least=2, warm_up=1)


class Views(nn.Module):
    """Takes images with channels first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(144, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.conv(images))
        scores: Tensor = self.linear(features.view(len(images), -1))
        return scores


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 3))


def task_of(model: Any = network, **more: Any) -> Task:
    data = TensorDataset(torch.randn(12, 1, 8, 8), torch.randint(3, (12,)))
    return Task(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        **{"train_data": data, "eval_data": data, **more},
    )


def measured(task: Task, **asked: Any) -> Profile:
    bench = ModelBench(task, CPU)
    return profile_task(
        bench, Asked(**{"threads": 1, "patience": QUICK, "peak_patience": QUICK, **asked}), name="small", host="here"
    )


def test_everything_is_measured_and_read_back(tmp_path: Path) -> None:
    profile = measured(task_of(), batches=(2, 8), batch=6)
    (tmp_path / "profile.json").write_text(json.dumps(profile.to_values()))
    assert Profile.load(tmp_path / "profile.json") == profile
    assert [(layer.name, layer.kind, layer.phase) for layer in profile.layers] == [
        ("0", "conv", "conv"),
        ("1", "other", "conv"),
        ("2", "other", "conv"),
        ("3", "linear", "fc"),
        ("4", "other", "fc"),
        ("5", "linear", "fc"),
        ("loss", "other", "fc"),
    ]
    assert all(layer.forward_s > 0 for layer in profile.layers)
    assert profile.layers[0].flops_forward == 2 * 4 * 9 * 36
    assert (profile.batch_size, profile.samples) == (6, 12)
    assert profile.update_s > 0
    assert profile.evaluate_s > 0
    found = profile.known()
    assert [size.samples for size in found.sizes] == [2, 6, 8], "with the one that the layers' times are of"
    assert (found.threads, found.thread_counts) == (1, ())
    assert found.micro_batch in (2, 8)
    assert {layout.layout for layout in found.layouts} == {"first", "last"}
    assert found.peak_flops >= found.sgemm_flops > 0
    assert 0 < found.conv_share < 1
    assert 0 < profile.layers[3].peak_share < 1
    assert found.fc_from == "3"
    assert found.hosts[0].name == "here"


def test_a_measured_profile_drives_planner_and_modelled_devices(tmp_path: Path) -> None:
    profile = measured(task_of(), batches=(2, 4))
    bench = ModelBench(task_of(), CPU)
    timed = with_times(bench.layers, profile, 4)
    assert timed[0].forward_s * 4 == pytest.approx(profile.layers[0].forward_s * profile.scaled(4))
    (tmp_path / "profile.json").write_text(json.dumps(profile.to_values()))
    compute = {"device": "modelled", "profile": str(tmp_path / "profile.json"), "batch_size": 4}
    result = run_virtual(run(topology_of(job={"steps": 2}, compute=compute), None))
    assert not result.errors
    computed = [event["compute_s"] for event in result.recorders["worker/0"].of("step")]
    assert computed[0] == pytest.approx(profile.step_s * profile.scaled(4), rel=0.01)


class Contended(ModelBench):
    """Two threads are in each other's way, and three no better than one."""

    def steps(self, samples: int, patience: Patience) -> Steps:
        count = torch.get_num_threads()
        with threads(1):
            found = super().steps(samples, patience)
        seconds = {1: 1.0, 2: 3.0, 3: 0.99}[count]
        return replace(found, conv=Times(seconds, 0.0), fc=Times(seconds, 0.0))


def test_the_fewest_threads_that_are_as_fast_are_chosen() -> None:
    asked = Asked(processors=3, patience=QUICK, peak_patience=QUICK, batches=(4,))
    profile = profile_task(Contended(task_of(eval_data=None), CPU), asked, name="small")
    found = profile.known()
    assert [each.threads for each in found.thread_counts] == [1, 2, 3]
    assert (found.threads, found.processors) == (1, 3)
    assert found.peak_flops == found.peak_flops_one_thread
    assert (profile.conv_s(4), profile.fc_s(4), profile.evaluate_s) == (1.0, 1.0, 0.0)


def test_sizes_end_where_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ModelBench(task_of(), CPU)
    monkeypatch.setattr(bench, "memory_free", lambda: bench.memory_of(5))
    profile = profile_task(bench, Asked(threads=1, patience=QUICK, peak_patience=QUICK, batches=(2, 4, 8)), name="small")
    assert [size.samples for size in profile.known().sizes] == [2, 4]
    monkeypatch.setattr(bench, "memory_free", lambda: 0)
    with pytest.raises(UsageError, match="not even the smallest"):
        profile_task(bench, Asked(threads=1, patience=QUICK, peak_patience=QUICK, batches=(2, 4, 8)), name="small")


def test_one_sample_is_left_out_where_batch_norm_needs_two() -> None:
    model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))  # noqa: E731
    sizes = [size.samples for size in measured(task_of(model)).known().sizes]
    assert sizes[0] == 2
    with pytest.raises(TaskError, match="Expected more than 1 value"):
        measured(task_of(model), batches=(1,))


def test_a_model_that_takes_one_layout_alone_is_profiled_with_it() -> None:
    data = TensorDataset(torch.randn(4, 2, 8, 8), torch.randint(3, (4,)))  # one channel is first and last
    found = measured(task_of(Views, train_data=data, eval_data=None), batches=(4,)).known()
    assert [layout.layout for layout in found.layouts] == ["first"]
    bench = ModelBench(task_of(Views, train_data=data), CPU, channels_last=True)
    with pytest.raises(TaskError, match="view"):
        profile_task(bench, Asked(threads=1, patience=QUICK, peak_patience=QUICK, batches=(4,)), name="small")


def test_products_count_forward_and_both_gradients() -> None:
    bench = ModelBench(task_of(), CPU)
    operations = products(bench.layers, bench.steps(4, QUICK))
    assert operations == {"0": 2 * 2592 * 4, "3": 3 * 2 * 144 * 8 * 4, "5": 3 * 2 * 8 * 3 * 4}, "the input needs no gradient"


TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from zmqtrain import Task

def task():
    data = TensorDataset(torch.randn(8, 4), torch.randint(3, (8,)))
    return Task(model=lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), loss=nn.functional.cross_entropy,
                optimizer=lambda parameters: torch.optim.Adam(parameters), train_data=data)
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("of_command.py").write_text(TASK)
    out = tmp_path / "profile.json"
    assert run_profile("of_command.py:task", out=out, batches="2,4", threads=1, device="cpu", seconds=0.01) == 0
    said = capsys.readouterr().out
    assert "of-command" in said
    assert "b_p" in said
    assert "GFLOP/s" in said
    profile = Profile.load(out)
    assert [layer.phase for layer in profile.layers] == ["conv", "conv", "fc", "fc"], "the output projection, and the loss"
    Path("job.toml").write_text(
        '[job]\nname = "of-file"\ntask = "of_command.py"\n[compute]\nbatch_size = 6\ngroup_size = 2\nprecision = "bfloat16"\n'
    )
    assert run_profile("job.toml", json_lines=True, batches="4", threads=1, seconds=0.01, settings=["job.seed=2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["row"] == "profile"
    assert lines[0]["batch_size"] == 3, "a worker's part"
    assert [line["samples"] for line in lines if line["row"] == "size"] == [3, 4]
    assert {line["row"] for line in lines} == {"profile", "layer", "size", "host"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batches": "4,2"}, "increasing numbers"),
        ({"batches": "x"}, "increasing numbers"),
        ({"out": Path("/no/such/folder/p.json")}, "there is no folder"),
        ({"links": True}, "give a file instead of a task"),
        ({"settings": ["job.seed=1"]}, "--set overrides values of a topology file"),
        ({"shaping": "paced"}, "--shaping is for emulated links"),
        ({"device": "tpu"}, "no device 'tpu'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_profile("no_such_file.py:task", **arguments)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is a folder: give a topology file, or a task as FILE\.py:FUNCTION$"):
        run_profile(str(tmp_path))
    (tmp_path / "topology.toml").touch()
    with pytest.raises(UsageError, match=f"zmqtrain report {tmp_path} shows"):
        run_profile(str(tmp_path))
