"""Tasks are found, called with their arguments, and checked; what is wrong is said with a way out."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from zmqtrain.errors import RunStopped, TaskError, UsageError
from zmqtrain.topology.schema import Topology
from zmqtrain.train.callback import Callback
from zmqtrain.train.task import Task, build_model, check_layers, check_model, load_task, user_code

SOURCE = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import TensorDataset
from zmqtrain.train.task import Task
from beside import WIDTH

@dataclass
class Settings:
    width: int = WIDTH

def task(width=Settings().width, data=None, **rest):
    made = Task(model=lambda: nn.Linear(2, width), loss=nn.functional.cross_entropy,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=TensorDataset(torch.zeros(4, 2), torch.zeros(4)))
    object.__setattr__(made, "collate", (data, width))
    return made

def strict(width): return task(width)
def needs(data): return task(data=data)
def raises(): return [][1]
def wrong(): return "task"
number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_task_file.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("WIDTH = 5\n")
    (tmp_path / "my_task_module.py").write_text("from my_task_file import *\n")
    (tmp_path / "broken.py").write_text("import torch\nimport nonesuch_library\n")
    return tmp_path


@pytest.mark.parametrize("spec", ["my_task_file.py:task", "my_task_module:task", "my_task_file.py"])
def test_a_task_is_found_in_a_file_or_a_module(spec: str, folder: Path) -> None:
    task: Any = load_task(spec, {"width": 7}, str(folder), folders=(folder,))
    assert task.collate == (str(folder), 7)
    assert load_task(spec, folders=("/nonexistent", folder)).collate == (None, 5)  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("spec", "args", "data", "error", "said"),
    [
        ("nonesuch.py:task", {}, None, UsageError, "there is no file nonesuch.py; looked for"),
        ("nonesuch.module:task", {}, None, UsageError, "there is no module 'nonesuch.module'"),
        ("my_task_file.py:tusk", {}, None, UsageError, "no function 'tusk'; did you mean 'task'"),
        ("my_task_file.py:number", {}, None, UsageError, "is of type int, not a function"),
        ("my_task_file.py:strict", {"widht": 1}, None, UsageError, "no argument 'widht'; did you mean 'width'"),
        ("my_task_file.py:strict", {}, None, UsageError, "needs the argument 'width'"),
        ("my_task_file.py:needs", {}, None, UsageError, "needs data: set"),
        ("my_task_file.py:needs", {}, "/nonexistent/data", UsageError, "the data path /nonexistent/data does not exist"),
        ("my_task_file.py:raises", {}, None, TaskError, "raised IndexError: list index out of range"),
        ("my_task_file.py:wrong", {}, None, TaskError, "returned an object of type str; it must return a zmqtrain.Task"),
        ("broken.py:task", {}, None, TaskError, "ModuleNotFoundError: No module named 'nonesuch_library'"),
        ("broken:task", {}, None, TaskError, "ModuleNotFoundError: No module named 'nonesuch_library'"),
    ],
)
def test_what_is_wrong_is_said(
    spec: str, args: dict[str, Any], data: str | None, error: type[Exception], said: str, folder: Path
) -> None:
    with pytest.raises(error, match=said) as caught:
        load_task(spec, args, data, folders=(folder,))
    if error is TaskError and "raised" in said:
        assert isinstance(caught.value.__cause__, IndexError)
        assert caught.value.__cause__.__traceback__ is not None


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": nn.Linear(1, 1).weight}, "Task.model is a Parameter; it must be a function"),
        ({"loss": 3}, "Task.loss is an int"),
        ({"schedule": 3}, "Task.schedule is an int"),
        ({"metrics": {"f1": 3}}, "metrics.'f1'. is an int"),
        ({"metrics": lambda output, target: 1.0}, "Task.metrics is a function; it must be a mapping"),
        ({"metrics": [len]}, "Task.metrics is a list"),
        ({"callbacks": Callback()}, "Task.callbacks is a Callback; it must be a list"),
        ({"train_data": 3}, "must be a map-style dataset"),
        ({"train_data": {"train": [1]}}, "is a dict of 'train': pass one of them"),
        ({"train_data": Endless(), "num_workers": 2}, "each process would read all of it"),
        ({"train_data": [1], "shard": lambda *_: 1}, "shard is only for streams"),
        ({"num_workers": -1}, "Task.num_workers = -1"),
        ({"persistent_workers": True}, "Task.persistent_workers configures loader processes, but num_workers is 0"),
        ({"forward": 3}, "Task.forward is an int"),
        ({"train_data": []}, "Task.train_data is empty"),
        ({"eval_data": []}, "Task.eval_data is empty"),
    ],
)
def test_a_task_checks_itself(fields: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {
        "model": nn.Tanh,
        "loss": nn.functional.cross_entropy,
        "optimizer": torch.optim.SGD,
        "train_data": TensorDataset(torch.zeros(1)),
    }
    with pytest.raises(TaskError, match=said):
        Task(**good | fields)


def test_what_cannot_be_kept_or_would_differ_between_workers_is_refused_before_the_first_step() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(TaskError, match="'phase' of the model Linear has type complex128"):
        check_model(model)
    rescaled = nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))
    for compute, exchange, alone in (
        ({}, {}, True),
        ({"groups": 2}, {"kind": "gossip"}, True),
        ({"groups": 2}, {"kind": "allreduce"}, False),
        ({"groups": 2, "group_size": 2}, {"kind": "averaging"}, False),
        ({}, {"kind": "model_server"}, False),
    ):
        topology = Topology.from_dict({"job": {}, "compute": compute, "exchange": exchange})
        with nullcontext() if alone else pytest.raises(TaskError, match="the layer '0' has max_norm = 1"):
            check_layers(rescaled, topology)


def test_gradients_scaled_by_counts_in_the_batch_are_refused_where_it_is_divided() -> None:
    scaled = nn.Sequential(nn.EmbeddingBag(3, 2, scale_grad_by_freq=True))
    for compute, exchange, whole in (
        ({}, {}, True),
        ({"groups": 2}, {"kind": "gossip"}, True),
        ({"groups": 2}, {"kind": "model_server"}, True),
        ({"group_size": 2, "grid": "2x1"}, {}, True),
        ({"group_size": 2}, {}, False),
        ({"groups": 2}, {"kind": "model_server", "staleness": "sync"}, False),
        ({"groups": 2, "group_size": 2, "grid": "2x1"}, {"kind": "allreduce"}, False),
        ({"accumulate": 2}, {}, False),
    ):
        topology = Topology.from_dict({"job": {}, "compute": compute, "exchange": exchange})
        with nullcontext() if whole else pytest.raises(TaskError, match="the layer '0' has scale_grad_by_freq"):
            check_layers(scaled, topology)


class Remembering(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_module_with_a_state_that_is_no_tensor_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Remembering(2, 2))
    with pytest.raises(TaskError, match=r"the module '1' of the model Sequential has a state of its own .*register_buffer"):
        check_model(model)
    check_model(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(TaskError, match=r"^the model Remembering has a state of its own"):
        check_model(Remembering(2, 2))


class Own(nn.Linear):
    """Its state dict is what ``change`` makes of the ordinary one."""

    def __init__(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__(2, 2)
        self.change = change

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.change(dict(super().state_dict(*args, **kwargs)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: {"linear": state}, "has 'linear', which is a dict, but checkpoints"),
        (lambda state: {"weight": state["weight"]}, "does not have the memory of the parameter 'bias'"),
        (lambda state: {name: tensor.clone() for name, tensor in state.items()}, "and not copies of them"),
        (lambda state: {f"layer.{name}": tensor for name, tensor in state.items()}, None),
    ],
)
def test_a_state_dict_of_the_models_own_must_have_what_is_trained(
    change: Callable[[dict[str, Any]], dict[str, Any]], said: str | None
) -> None:
    with nullcontext() if said is None else pytest.raises(TaskError, match=said):
        check_model(Own(change))


def test_a_lazy_model_is_refused_until_it_has_seen_an_example() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(TaskError, match=r"parameter '0\.weight' of the model Sequential has no shape yet.*call the model once"):
        check_model(model)
    model(torch.zeros(1, 8))
    check_model(model)


def test_a_model_without_values_is_refused() -> None:
    data = TensorDataset(torch.zeros(4, 2), torch.zeros(4))
    empty = Task(
        model=lambda: nn.Linear(2, 2, device="meta"), loss=nn.functional.mse_loss, optimizer=torch.optim.SGD, train_data=data
    )
    with pytest.raises(TaskError, match="'weight' of the model Linear is on the device meta"):
        build_model(empty)
    assert build_model(empty, without_content=True).weight.is_meta


DRAWS = """
import random, numpy, torch
{at_import}
def task():
    global drawn
    drawn = (torch.rand(1).item(), float(numpy.random.rand()), random.random())
    from zmqtrain import Task
    return Task(model=lambda: None, loss=print, optimizer=print, train_data=[drawn])
"""


@pytest.mark.parametrize("by", ["file", "module"])
@pytest.mark.parametrize(
    ("at_import", "as_seeded"),
    [
        ("", 0),
        ("torch.manual_seed(3); numpy.random.seed(3); random.seed(3)", 3),
        ("own = torch.rand(2), numpy.random.rand(2)", None),
    ],
)
def test_what_a_task_draws_follows_from_the_seed(at_import: str, as_seeded: int | None, by: str, tmp_path: Path) -> None:
    """On each worker, and again in a process that has the module already; what a module seeds by itself holds."""
    name = f"draws_{by}_{as_seeded}"
    (tmp_path / f"{name}.py").write_text(DRAWS.format(at_import=at_import))
    spec = f"{name}.py" if by == "file" else name
    before = torch.get_rng_state(), random.getstate()
    found = []
    for seed in (7, 7, 8):
        (drawn,) = load_task(spec, folders=(tmp_path,), seed=seed).train_data
        found.append(drawn)
        torch.rand(3)  # somebody else draws meanwhile
        random.random()
    assert found[0] == found[1]
    assert (found[0] == found[2]) == bool(at_import), "a module is imported once"
    if as_seeded:
        torch.manual_seed(as_seeded)
        numpy.random.seed(as_seeded)
        random.seed(as_seeded)
        assert found[0] == (torch.rand(1).item(), numpy.random.rand(), random.random())
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    load_task(spec, folders=(tmp_path,))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("spec", ["misses_a_module.py", "misses_a_module"])
def test_a_folder_of_modules_that_does_not_exist_is_named(spec: str, tmp_path: Path) -> None:
    (tmp_path / "misses_a_module.py").write_text("import module_of_nobody\n")
    with pytest.raises(TaskError, match=r"No module named 'module_of_nobody' \(there is no folder .*libs: see"):
        load_task(spec, folders=(tmp_path, tmp_path / "libs"))


def test_a_relative_import_in_a_file_names_the_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train_it.py").write_text("from . import other\n")
    with pytest.raises(TaskError, match=r"relative import.*name the module instead, such as \[job\] task = .package\.train_it:"):
        load_task("package/train_it.py:task", folders=(tmp_path,))


ARGUMENTS = """
import argparse, sys
from zmqtrain import Task
parser = argparse.ArgumentParser()
parser.add_argument({name!r}, default="none")
given = parser.parse_args()
def task():
    return Task(model=lambda: None, loss=print, optimizer=print, train_data=[(given.seed, parser.prog, sys.argv[1:])])
"""


def test_a_task_finds_no_arguments_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optional_argument.py").write_text(ARGUMENTS.format(name="--seed"))
    (tmp_path / "needed_argument.py").write_text(ARGUMENTS.format(name="seed"))
    command = ["zmqtrain", "simulate", "FILE", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", command)
    task: Any = load_task("optional_argument.py:task", folders=(tmp_path,))
    assert task.train_data == [("none", "optional_argument.py", [])]
    with pytest.raises(TaskError, match=r"called sys\.exit\(2\)\. If it is argparse that did: .*--set job\.args\.NAME=VALUE"):
        load_task("needed_argument.py:task", folders=(tmp_path,))
    assert sys.argv is command


def test_an_exit_within_the_task_says_where() -> None:
    with pytest.raises(TaskError, match=r"Task\.model\(\) ended the process: it called sys\.exit\(5\)"), user_code("Task.model()"):
        sys.exit(5)
    with pytest.raises(RunStopped), user_code("Task.model()"):
        raise RunStopped(3)
