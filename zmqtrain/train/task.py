"""A `Task`: what a user writes, and how it is found, called and checked.

A task's own code may raise anything. The caller gets a `TaskError` whose cause is the original error, with its traceback.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from zmqtrain.data.batch import Forward
from zmqtrain.data.file_modules import load_file
from zmqtrain.data.processes import Processes
from zmqtrain.data.source import Shard, Source, source_of
from zmqtrain.errors import RunStopped, TaskError, UsageError, ZmqTrainError
from zmqtrain.exchange.momentum import explicit_of, with_momentum
from zmqtrain.exchange.optimizer import require_no_step_hooks, require_separable
from zmqtrain.parallel.verify.case import alone
from zmqtrain.topology.find_task import absent
from zmqtrain.topology.job import Job
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.suggest import did_you_mean
from zmqtrain.train.adapted_schedule import AdaptedSchedule, Schedule
from zmqtrain.train.callback import Callback
from zmqtrain.train.checkpoint.folder import can_hold
from zmqtrain.train.random_state import imported, seed_everything
from zmqtrain.train.shadowed import OF_TASKS, beside_of, require_own, require_own_modules
from zmqtrain.train.shared_storage import check_storage, storage_of
from zmqtrain.train.shares import in_step
from zmqtrain.words import typed

#: Maps a batch's output and target to the mean over its samples, a tensor of one element.
Measure: TypeAlias = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, its data and how it learns. Every worker builds its own from the same function, with the same seed."""

    model: Callable[[], nn.Module]
    """Builds the model. Called once on each worker, with the same seed on all. Steps are computed in training mode, evaluations in
    evaluation mode; a module whose ``train(mode)`` keeps it in evaluation mode stays there."""
    loss: Measure
    """``loss(output, target)``: the *mean* loss over the samples that it is given. If samples have different weights, the pair
    ``(sum, weight)``: the sum of the weighted losses, and that of the weights. torch's cross-entropy with class weights is divided
    in this way automatically. Where the samples of a step are divided, the first steps, and some later ones, compute it of halves,
    too, and refuse it if it is no mean."""
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    """Builds the optimizer from the model's parameters that require a gradient, in the order of ``model.parameters()``: frozen ones
    are not among them. It may divide them into several parameter groups."""
    train_data: Any
    """A map-style dataset (``len(data)`` and ``data[i]``), a stream (``iter(data)``), or a `torch.utils.data.DataLoader` of either;
    `zmqtrain.data.source` says which settings of a loader are used. Samples are whatever the collate function accepts. How a batch
    reaches the model and the loss is explained in `zmqtrain.data.batch`: (input, ..., target), or a mapping with ``labels``. A
    `TensorDataset` is indexed a batch at a time."""
    eval_data: Any = None
    """The data for evaluation, as ``train_data``; of a loader, its own batch size is used but not its processes. None: no
    evaluation."""
    metrics: Mapping[str, Measure] | None = None
    """Metrics, each the mean over the samples that it is given, or the pair ``(sum, weight)``. Others are left out, with a warning.
    By default ``accuracy`` if the targets are class numbers, otherwise none. One named ``loss`` takes the place of the task's loss
    in evaluations (``eval_loss``)."""
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    """Makes a learning-rate schedule, which is stepped once after each training step."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch from a list of samples, in place of torch's ``default_collate``."""
    transform: Callable[[Any], Any] | None = None
    """Applied to each training batch where it is loaded, for instance to augment it."""
    forward: Forward | None = None
    """``forward(model, batch)`` returns the output, for batches that do not show how the model is called. The loss and the metrics
    then get the whole batch as their target."""
    num_workers: int = 0
    """The number of processes that load training batches for each worker; 0: a thread of the worker does it. The batches are the
    same."""
    prefetch_factor: int | None = None
    """How many batches each of these processes loads in advance; 2 by default."""
    pin_memory: bool | None = None
    """Whether batches are placed in pinned memory, from which devices copy; by default if there is such a device."""
    persistent_workers: bool = False
    """Whether these processes are kept for all epochs."""
    worker_init_fn: Callable[[int], Any] | None = None
    """Called in each of these processes, with its number, before it loads anything."""
    multiprocessing_context: Any = None
    """How these processes are started: ``fork`` by default; with ``spawn`` and ``forkserver`` the dataset is pickled."""
    shard: Shard | None = None
    """``shard(dataset, rank, world)``: the part of a stream that one of ``world`` workers reads. Without it each worker reads the
    whole stream and takes its samples of each step. With several ``num_workers`` the part must divide itself between them
    (`torch.utils.data.get_worker_info`), as Hugging Face's and WebDataset's streams do."""

    callbacks: Sequence[Callback] = ()
    """Called after steps, evaluations and checkpoints, and when workers come and go, on every worker (`zmqtrain.Callback`)."""

    def __post_init__(self) -> None:
        if not isinstance(self.callbacks, Iterable):
            raise TaskError(f"Task.callbacks is {typed(self.callbacks)}; it must be a list of callbacks")
        if not isinstance(self.metrics, Mapping | None):
            raise TaskError(f'Task.metrics is {typed(self.metrics)}; it must be a mapping, such as {{"name": metric}}')
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise TaskError(f"Task.callbacks has {typed(callback)}: each must be an object of a zmqtrain.Callback class")
        for name in ("model", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise TaskError(_not_callable(name, getattr(self, name)))
        for name in ("schedule", "collate", "transform", "forward", "worker_init_fn", "shard"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TaskError(_not_callable(name, getattr(self, name)))
        for name, metric in (self.metrics or {}).items():
            if not callable(metric):
                raise TaskError(_not_callable(f"metrics[{name!r}]", metric))
        self.training()
        self.evaluating()

    def training(self) -> Source:
        """The source of training samples. Raises `TaskError`."""
        return source_of(
            "Task.train_data",
            self.train_data,
            collate=self.collate if not isinstance(self.train_data, DataLoader) else None,
            transform=self.transform,
            processes=self._processes(),
            pin=self.pin_memory,
            shard=self.shard,
        )

    def evaluating(self) -> Source | None:
        """The source of samples for evaluation; ``None`` if there is none. Raises `TaskError`."""
        if self.eval_data is None:
            return None
        loader = isinstance(self.eval_data, DataLoader)
        return source_of("Task.eval_data", self.eval_data, collate=None if loader else self.collate)

    def _processes(self) -> Processes | None:
        if isinstance(self.num_workers, bool) or not isinstance(self.num_workers, int) or self.num_workers < 0:
            raise TaskError(f"Task.num_workers = {self.num_workers!r}: it must be a number of processes, 0 or more")
        given = {
            "prefetch_factor": self.prefetch_factor is not None,
            "persistent_workers": self.persistent_workers,
            "worker_init_fn": self.worker_init_fn is not None,
            "multiprocessing_context": self.multiprocessing_context is not None,
        }
        if not self.num_workers:
            if any(given.values()):
                name = next(name for name in given if given[name])
                raise TaskError(f"Task.{name} configures loader processes, but num_workers is 0: set Task.num_workers, too")
            return None
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise TaskError(f"Task.prefetch_factor = {self.prefetch_factor!r}: it must be at least 1")
        return Processes(
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
        )


def _not_callable(name: str, value: object) -> str:
    return f"Task.{name} is {typed(value)}; it must be a function (or a class), such as `{name}=lambda ...: ...`"


def check_model(model: object) -> None:
    """Raise `TaskError` unless ``model`` is a module with something to train."""
    if not isinstance(model, nn.Module):
        raise TaskError(f"Task.model() returned an object of type {type(model).__name__}; it must return a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise TaskError(
            "the model is a ScriptModule, which takes no hooks: train the module that it was made of, and make a script of that "
            "afterwards"
        )
    parameters = list(model.parameters())
    if not parameters:
        raise TaskError(
            f"the model {type(model).__name__} has no parameters, so there is nothing to train. Are its layers assigned as "
            "attributes? (Layers in a plain list are not found; use torch.nn.ModuleList.)"
        )
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise TaskError(
            f"the parameter {lazy[0]!r} of the model {type(model).__name__} has no shape yet, and workers must agree "
            "on shapes before the first batch: call the model once on an example, such as model(torch.zeros(1, 8)), before "
            "Task.model() returns it, and before session.replicate()"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if not can_hold(dtype):
            raise TaskError(
                f"{name!r} of the model {type(model).__name__} has type {dtype}, which cannot be sent or kept in model.safetensors"
                ": make it of another type, for instance of real and imaginary parts"
            )
    for name, module in model.named_modules():
        own = type(module).get_extra_state is not nn.Module.get_extra_state
        if own and not isinstance(module, torch.jit.ScriptModule):
            raise TaskError(
                f"{f'the module {name!r} of ' if name else ''}the model {type(model).__name__} has a state of its own "
                "(get_extra_state), which is not kept in checkpoints and model.safetensors: keep it in buffers (register_buffer)"
            )
    if not any(parameter.requires_grad and parameter.numel() for parameter in parameters):
        raise TaskError(f"no parameter of the model {type(model).__name__} requires a gradient, so there is nothing to train")
    check_storage(model)
    _check_state(model)


def _check_state(model: nn.Module) -> None:
    """Raise `TaskError` if a ``state_dict`` of the model's own is not one of its tensors: it is what checkpoints, and those who
    load model.safetensors, know of the model."""
    state = model.state_dict()
    other = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise TaskError(
            f"model.state_dict() of the model {type(model).__name__} has {other!r}, which is {typed(state[other])}, but "
            "checkpoints and model.safetensors hold only tensors: let it return tensors by their names, as nn.Module does"
        )
    held = {storage_of(value) for value in state.values()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel() and storage_of(parameter) not in held:
            raise TaskError(
                f"model.state_dict() of the model {type(model).__name__} does not have the memory of the parameter {name!r}, but "
                "it is what checkpoints and model.safetensors hold, and where a resumed run puts them: let it return all trained "
                "parameters, and not copies of them"
            )


def check_layers(model: nn.Module, topology: Topology) -> None:
    """Raise `TaskError` for layers that compute something else on several processes: a forward that changes parameters, each
    worker's by its own samples, and statistics and counts that are meant to be those of all samples."""
    for name, module in model.named_modules() if _adds_up_gradients(topology) else ():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
            raise TaskError(
                f"the layer {name!r} has scale_grad_by_freq = True: it divides gradients by how often an index is in the batch, "
                "and each worker, or micro-batch, counts in its own samples only. Leave it out, or let each group be one worker "
                "that takes its batch at once"
            )
    if not shares_parameters(topology):
        return
    synced = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if synced and not topology.divided and not torch.distributed.is_initialized():
        raise TaskError(
            f"the layer {synced[0]!r} is a SyncBatchNorm, which needs a process group of torch.distributed, and without one would "
            'use each worker\'s own samples only. Use nn.BatchNorm1d, 2d or 3d: with [parallel] statistics = "whole", for those of '
            "the whole batch of a group of several workers, or without it, if those of each worker's own samples will do"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise TaskError(
                f"the layer {name!r} has max_norm = {module.max_norm:g}: its forward changes those of its weights that a worker's "
                "own samples use, so workers would have different ones. Leave max_norm out, and divide by the norm where the "
                "weights are used"
            )


def _adds_up_gradients(topology: Topology) -> bool:
    """Whether a step's gradient is a sum over parts of its batch, each computed by itself."""
    compute = topology.compute
    workers = 1 if topology.divided else compute.group_size  # a divided model knows the whole batch
    return workers * (compute.groups if in_step(topology) else 1) * compute.accumulate > 1


def shares_parameters(topology: Topology) -> bool:
    """Whether several processes have the same parameters."""
    compute, exchange = topology.compute, topology.exchange
    alone = compute.group_size == 1 and (compute.groups == 1 or exchange.kind in ("gossip", "averaging"))
    return not alone or exchange.kind == "model_server"


def build_model(task: Task, *, without_content: bool = False) -> nn.Module:
    """The task's model, checked. Seed torch first. ``without_content``: it may be on the device meta, for its shapes alone."""
    with user_code("Task.model()"):
        model = task.model()
    check_model(model)
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta and not without_content]
    if empty:
        raise TaskError(
            f"the parameter {empty[0]!r} of the model {type(model).__name__} is on the device meta, where it has no values: let "
            "Task.model() build it on the CPU"
        )
    return model


def build_optimizer_of(
    task: Task, model: nn.Module, *, lr_factor: float = 1.0, lr: float | None = None, momentum: float | None = None
) -> tuple[Optimizer, Schedule | None]:
    """The task's optimizer of the model's trainable parameters, with changed learning rates, and the task's schedule.

    ``lr``: replaces the first parameter group's; the others keep their ratio to it, and there is no schedule. ``momentum``:
    replaces that of all groups. Raises `TaskError`."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.numel()]
    with user_code("Task.optimizer(parameters)"):
        optimizer = task.optimizer(parameters)
    if not isinstance(optimizer, Optimizer):
        raise TaskError(
            f"Task.optimizer(parameters) returned an object of type {type(optimizer).__name__}; it must return a "
            "torch.optim.Optimizer"
        )
    known = {id(parameter) for parameter in parameters}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise TaskError("Task.optimizer(parameters) returned an optimizer of other parameters than those it was given")
    if lr is not None:
        lr_factor *= _ratio(optimizer, lr)

    def adapt(optimizer: Optimizer) -> None:
        if momentum is not None:
            _set_momentum(optimizer, momentum)
        if lr_factor != 1.0:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * lr_factor

    if task.schedule is None or lr is not None:
        adapt(optimizer)
        return optimizer, None
    with user_code("Task.schedule(optimizer)"):
        schedule = task.schedule(optimizer)
    if isinstance(schedule, ReduceLROnPlateau) or not isinstance(schedule, LRScheduler):
        raise TaskError(
            f"Task.schedule(optimizer) returned an object of type {type(schedule).__name__}; it must return a torch "
            "LRScheduler that is stepped once a training step (ReduceLROnPlateau needs a metric and is not supported)"
        )
    adapts = momentum is not None or lr_factor != 1.0
    return optimizer, AdaptedSchedule(schedule, optimizer, adapt) if adapts else schedule


def build_optimizer(task: Task, model: nn.Module, topology: Topology) -> tuple[Optimizer, Schedule | None]:
    """The task's optimizer and schedule, as ``[optimizer]`` changes them."""
    settings = topology.optimizer
    optimizer, schedule = build_optimizer_of(
        task,
        model,
        lr_factor=settings.lr_factor(topology.compute.groups),
        lr=settings.lr,
        momentum=settings.explicit_momentum,
    )
    if topology.exchange.kind == "model_server":
        require_no_step_hooks(optimizer)
    else:
        require_separable(optimizer)
    return optimizer, schedule


def _ratio(optimizer: Optimizer, lr: float) -> float:
    """The factor on all learning rates that makes the first one ``lr``."""
    first = float(optimizer.param_groups[0]["lr"])
    if not first:
        raise TaskError(
            f"[optimizer] lr = {lr:g} cannot replace the learning rate of the first parameter group, which is 0: set it in the task"
        )
    return lr / first


def _set_momentum(optimizer: Optimizer, momentum: float) -> None:
    for group in optimizer.param_groups:
        if explicit_of(group) is None:
            raise TaskError(
                f"[optimizer] momentum = {momentum:g}: {type(optimizer).__name__} has neither momentum nor betas; remove the "
                "setting"
            )
        changed = with_momentum(group, momentum)
        for key in ("momentum", "nesterov", "betas"):
            if key in changed:
                value = changed[key]
                group[key] = tuple(value) if isinstance(value, list) else value


#: How argparse ends a program whose arguments do not fit.
_ARGPARSE_EXIT = 2
_NO_ARGUMENTS = (
    "If it is argparse that did: a task has no command line. Make its arguments those of the task's function, and set them in "
    "[job] args (--set job.args.NAME=VALUE)"
)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """A context that turns anything the task's own code raises into a `TaskError` that says that ``what`` raised it, with the
    original error as its cause."""
    try:
        yield
    except (ZmqTrainError, RunStopped):
        raise
    except SystemExit as error:
        hint = f". {_NO_ARGUMENTS}" if error.code == _ARGPARSE_EXIT else ""
        raise TaskError(f"{what} ended the process: it called sys.exit({error.code}){hint}") from error
    except Exception as error:
        raise TaskError(f"{what} raised {type(error).__name__}: {error}") from error


def task_of_job(job: Job, data_path: str | None = None, *, here: str | Path = ".") -> Task:
    """The task that ``[job] task`` names. Arguments and errors are those of `load_task`; ``here``: the working folder."""
    if job.task is None:
        raise UsageError(
            "[job] task is missing: name a function that returns a zmqtrain.Task (module:function or file.py:function)"
        )
    return load_task(job.task, job.args, data_path, folders=job.folders(here), seed=job.seed)


def load_task(
    spec: str,
    args: Mapping[str, Any] | None = None,
    data_path: str | None = None,
    *,
    folders: Sequence[str | Path] = (".",),
    seed: int = 1,
) -> Task:
    """Import and call the function that ``spec`` names: ``package.module:function`` or ``path/to/file.py:function``.

    The global generators of Python, numpy and torch are seeded before, so that all workers draw the same (a split, synthetic data);
    afterwards they are what they were.

    Args:
        spec: where the function is; without ``:function`` it is called ``task``.
        args: ``[job] args``, passed as keyword arguments.
        data_path: passed as ``data`` if the function takes it; must exist.
        folders: where relative files, and modules that are not installed, are looked for.
        seed: ``[job] seed``.

    Raises:
        UsageError: there is no such file, module, function, argument or data path.
        TaskError: the code raised, or did not return a `Task`.
    """
    source, _, name = spec.rpartition(":") if ":" in spec else (spec, "", "task")
    with _without_arguments(source), _missed(folders), alone():
        seed_everything(seed)
        module = _load_file(source, folders) if source.endswith(".py") else _load_module(source, folders)
        function = getattr(module, name, None)
        if function is None:
            near = did_you_mean(name, dir(module))
            hint = f"; did you mean {near!r}?" if near else ""
            raise UsageError(f"[job] task = {spec!r}: {source} has no function {name!r}{hint}")
        return task_of(function, spec, args, data_path)


@contextmanager
def _missed(folders: Sequence[str | Path]) -> Iterator[None]:
    """If a module that the task imports is not found, its folder may be one that does not exist."""
    try:
        yield
    except TaskError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and (missing := absent(folders)):
            raise TaskError(f"{error}{missing}") from error.__cause__
        raise


@contextmanager
def _without_arguments(program: str) -> Iterator[None]:
    """A task that reads its own command line (argparse) finds none in every process, and not that of a command or of a worker."""
    before = sys.argv
    sys.argv = [program]
    try:
        yield
    finally:
        sys.argv = before


def task_of(function: Any, spec: str, args: Mapping[str, Any] | None = None, data_path: str | None = None) -> Task:
    """Call the function that ``spec`` names; a `Task` is returned as it is. Arguments and errors are those of `load_task`."""
    if isinstance(function, Task):
        return function
    if not callable(function):
        raise UsageError(
            f"[job] task = {spec!r}: {spec.rpartition(':')[2]} is of type {type(function).__name__}, not a function that returns "
            "a Task"
        )
    keywords = _keywords(function, spec, dict(args or {}), data_path)
    with user_code(f"the task's function {spec}"):
        task = function(**keywords)
    if not isinstance(task, Task):
        raise TaskError(
            f"the task's function {spec} returned an object of type {type(task).__name__}; it must return a zmqtrain.Task"
        )
    return task


def _keywords(function: Callable[..., Any], spec: str, args: dict[str, Any], data_path: str | None) -> dict[str, Any]:
    """The arguments for the task's function; `UsageError` where they do not fit."""
    parameters = inspect.signature(function).parameters
    any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in args:
        if key not in parameters and not any_keyword:
            near = did_you_mean(key, parameters)
            hint = f"; did you mean {near!r}?" if near else f"; it takes {', '.join(parameters) or 'none'}"
            raise UsageError(f"[job] args: the task's function {spec} takes no argument {key!r}{hint}")
    if data_path is not None and not Path(data_path).exists():
        raise UsageError(
            f"the data path {data_path} does not exist on this host. Correct [data] path, --data or ZMQTRAIN_DATA; "
            "the path must exist on every host"
        )
    if data_path is not None and ("data" in parameters or any_keyword):
        args.setdefault("data", data_path)
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in args
    ]
    if missing == ["data"]:
        raise UsageError(f"the task's function {spec} needs data: set [data] path, --data PATH or ZMQTRAIN_DATA")
    if missing:
        raise UsageError(f"the task's function {spec} needs the argument {missing[0]!r}: set it in [job] args")
    return args


def _load_file(source: str, folders: Sequence[str | Path]) -> ModuleType:
    found = next((path for folder in folders if (path := Path(folder, source).resolve()).is_file()), None)
    if found is None:
        looked = ", ".join(str(Path(folder, source).resolve()) for folder in folders)
        raise UsageError(f"[job] task: there is no file {source}; looked for {looked}")
    name = f"zmqtrain_task_{found.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(found):
        return imported(str(found), lambda: loaded)
    _search(found.parent)
    require_own_modules(found, found.parent)
    try:
        with user_code(f"importing {found}"):
            return imported(str(found), lambda: load_file(name, found))
    except TaskError as error:
        if isinstance(error.__cause__, ImportError) and "relative import" in str(error.__cause__):
            raise TaskError(
                f"{error}. A file that is named by its path is in no package: name the module instead, such as "
                f'[job] task = "{_module_name(found)}:..."'
            ) from error.__cause__
        raise


def _module_name(file: Path) -> str:
    """The name of a module in its package."""
    parts, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        parts, folder = [folder.name, *parts], folder.parent
    return ".".join(parts if len(parts) > 1 else [file.parent.name, file.stem])


def _load_module(source: str, folders: Sequence[str | Path]) -> ModuleType:
    for folder in folders:
        _search(Path(folder).resolve())
    importlib.invalidate_caches()
    root = source.partition(".")[0]
    for folder in folders:
        if (beside := beside_of(Path(folder).resolve(), root)) is not None:
            require_own(root, beside, Path(folder).resolve(), f"it is in {root!r}")
            break
    try:
        return imported(source, lambda: importlib.import_module(source))
    except ModuleNotFoundError as error:
        if error.name is not None and (source == error.name or source.startswith(error.name + ".")):
            raise UsageError(
                f"[job] task: there is no module {source!r} ({error.name!r} is neither installed nor in "
                f"{', '.join(str(folder) for folder in folders)}); name a module, or a file that ends in .py"
            ) from None
        raise TaskError(f"importing {source} raised {type(error).__name__}: {error}") from error
    except Exception as error:
        raise TaskError(f"importing {source} raised {type(error).__name__}: {error}") from error


def _search(folder: Path) -> None:
    """Let imports find modules beside the task, after all installed ones."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        OF_TASKS.add(folder)
