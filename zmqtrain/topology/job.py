"""``[job]``: what is trained, for how long, and what happens when something goes wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from zmqtrain.topology.section import MOST, Alone, Every, Section, Texts, Timeout, is_plain, seconds_of
from zmqtrain.topology.timeouts import Timeouts

_TASK = re.compile(r"[^:]+(:[A-Za-z_]\w*)?")
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"


def _task(value: str) -> str:
    if not _TASK.fullmatch(value):
        raise ValueError('is not a task: write "package.module:function" or "path/to/file.py:function"')
    return value


def _modules(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f'cannot be imported: {name}; write names of modules, like "package.module"')
    return value


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    for key, item in value.items():
        if not is_plain(item):
            raise ValueError(f"cannot pass {key} to the task: use strings, numbers, booleans, arrays and tables")
    return value


def _ports(value: str) -> str:
    first, mark, last = value.partition("-")
    if not (mark and first.isdecimal() and last.isdecimal() and 0 < int(first) < int(last) < 65536):
        raise ValueError('is not a range of ports: write it like "29400-29500"')
    return value


def _steps_or_time(value: int | str) -> int | str:
    if isinstance(value, int) and not 0 <= value <= MOST:
        raise ValueError(f"must be between 0 and {MOST} steps")
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


class Until(Section):
    """Train until an evaluation metric is good enough."""

    metric: str = Field(min_length=1, description="Name of the evaluation metric to watch, such as `eval_accuracy`.")
    reaches: Annotated[float, AfterValidator(_finite)] = Field(
        description="Training ends at the first evaluation at which the metric is at least this value (at most, if its name "
        "contains `loss`)."
    )
    max_steps: int | None = Field(
        default=None, ge=1, le=MOST, description="Give up after this many steps of a group, with a warning."
    )

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The metric's value, if it is among ``metrics``, by name."""
        return metrics.get(self.metric, metrics.get(f"eval_{self.metric}"))

    def reached(self, value: float) -> bool:
        return value <= self.reaches if "loss" in self.metric else value >= self.reaches


class Job(Section):
    """What to train, and for how long."""

    name: str = Field(
        default="job",
        pattern=NAME_PATTERN,
        description="Name of the run directory, `runs/NAME-NNN`. Default: the topology file's name without its extension.",
    )
    task: Annotated[str, AfterValidator(_task)] | None = Field(
        default=None,
        description="A function that returns a `zmqtrain.Task`, written `package.module:function` or `path/file.py:function`; "
        "without `:function`, the function is called `task`. Leave it out when you launch a script of your own.",
    )
    args: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(
        default_factory=dict, description="Keyword arguments for the task function."
    )
    python_path: Texts = Field(
        default=(),
        description="Folders to put at the front of Python's search path in every process. `task` is looked for there, and then "
        "in the working folder.",
    )
    preload: Annotated[Texts, AfterValidator(_modules)] = Field(
        default=(),
        description="Modules that take long to import, such as `sklearn.datasets`: each host imports them once, before it forks "
        "the processes of its roles, which share them. They must not start threads or use CUDA when they are imported, and see no "
        "variables of single roles then.",
    )
    seed: int = Field(
        default=1,
        ge=0,
        lt=2**63,
        description="Fixes the initial weights, the order of the data and every other random choice of the run.",
    )
    steps: int | None = Field(default=None, ge=1, le=MOST, description="Train for this many steps of each group.")
    epochs: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="Train for this many passes over the training data. If none of `steps`, `epochs` and `until` is given: one "
        "pass.",
    )
    until: Until | None = Field(default=None, description="Train until a metric is reached.")
    weights: str | None = Field(
        default=None,
        min_length=1,
        description="Start from the parameters of a trained model instead of new ones: a run, its `model.safetensors` (or any "
        "such file), a checkpoint, or a folder of checkpoints. Only the model is read, so the run may have a "
        "different shape from the one that wrote it.",
    )
    optimizer_state: Literal["new", "kept"] = Field(
        default="new",
        description="What the optimizer begins with if `weights` is given. new: nothing. kept: what it had there (momentum, Adam's "
        "averages, its step counts). Then `weights` must name a run or a checkpoint with the same class of optimizer and "
        "`[exchange] kind`; the number of groups, their size and the grid may differ.",
    )
    eval_every: int = Field(default=0, ge=0, le=MOST, description="Steps between evaluations. 0: only at the end.")
    checkpoint_every: Annotated[Every, AfterValidator(_steps_or_time)] = Field(
        default="10 min",
        description="Steps between checkpoints, or the time between them. The end of a run is a checkpoint, too. 0: no "
        "checkpoints; the run still leaves its model, but cannot be resumed.",
    )
    keep_checkpoints: int = Field(default=2, ge=1, le=MOST, description="How many of the latest checkpoints to keep on disk.")
    timeout: Timeout = Field(
        default=60.0,
        description="The one number from which all time-outs are derived, in seconds or with a unit. `zmqtrain check` prints them.",
    )
    alone: Alone = Field(
        default=600.0,
        description="How long processes train on when the launcher is gone (`kill -9`, its machine restarts), for `zmqtrain launch "
        "--continue RUN` to take over; then they end. For processes that outlive their launcher: those of the ssh engine, and of "
        "`--detach` with the local engine. 0: they end with it, as all others do.",
    )
    on_nan: Literal["stop", "continue"] = Field(
        default="stop",
        description="What to do when a loss is NaN or infinite: stop with a checkpoint of the last good step, or carry on.",
    )
    elastic: bool | None = Field(
        default=None,
        description="Carry on without workers that are lost (killed, or gone with their host), and let others take their place. "
        "Default: true among groups of one worker for gossip, averaging and model servers (these without snapshot, parts and the "
        "sample ring, and without pipeline or accumulate together with merged_fc; synchronous ones also without clip_norm and "
        "float16), unless their data is a stream. It is "
        "possible, too, among groups of several workers with model servers (without float16, compression and until), averaging "
        '(without float16, deltas, parts and ring = "tensors") and gossip (without float16, parts and ring = "tensors"), and with '
        "all-reduce, unless gradients are compressed; with all-reduce, and averaging or gossip among groups of several, gradients "
        "then travel in messages also within a host. A grid of one row needs local statistics of batch norm; one of several rows "
        "needs all-reduce, one group and several columns, and has no compression, every, parts, float16, sample ring, "
        "and no layers on grids of their own; or model servers, or averaging or gossip among groups, which are lost and come back "
        'as a whole, without float16, deltas, parts, ring = "tensors" and layers on grids of their own.',
    )
    on_resize: Literal["keep", "sqrt", "linear"] = Field(
        default="keep",
        description="For elastic all-reduce: what a changed number of workers changes. keep: the batch of a step stays, so workers "
        "take larger or smaller shares, and the learning rate stays. sqrt, linear: each worker's share stays, so the batch has "
        "as many more or fewer samples as there are workers, and the learning rate is multiplied by that factor (linear) or its "
        "square root.",
    )
    restarts: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="How many times each worker of an elastic run is restarted after it was lost; and how many times a run that "
        "cannot go on, elastic or not, begins again as a whole from its newest checkpoint, after a failure that another try may "
        "cure (exit codes of 128 and above). A host that was lost is left out if the others have room for all roles, or if the "
        "file leaves the number of workers to the hosts; otherwise it is waited for, up to `min_workers_wait`.",
    )
    min_workers: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="The fewest workers of an elastic run. With fewer, it waits for others to come back while those that are left "
        "train on; then it stops with a checkpoint, and an exit code worth retrying. Default: it continues with any number.",
    )
    max_workers: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="For elastic all-reduce: how many workers the run may have. Beyond those with which it begins, others take "
        "part while it trains (`zmqtrain join RUN`). Default: no others.",
    )
    min_workers_wait: Alone = Field(
        default=600.0,
        description="How long an elastic run may have fewer than `min_workers` workers (0: it stops at once), and how long a run "
        "that begins again waits for a host.",
    )
    port: int = Field(default=0, ge=0, le=65535, description="TCP port of the coordinator. 0: any free port.")
    ports: Annotated[str, AfterValidator(_ports)] | None = Field(
        default=None,
        description="Range of TCP ports on which all processes of the run listen, such as `29400-29500`, for firewalls. Each "
        "process takes two. Default: any free ports.",
    )
    transport_encryption: Literal["auto", "required", "disabled"] = Field(
        default="auto",
        description="Encrypt network traffic, and admit only processes that belong to the run. auto: as soon as a host's address "
        "is not this machine's own (emulated hosts are on this machine). required: always, even among processes of "
        "one machine (shared memory is never encrypted). disabled: never; for a network that you trust.",
    )
    oversubscribe: bool = Field(default=False, description="Allow more workers than slots; they then share the processors.")

    @model_validator(mode="after")
    def _one_pass_by_default(self) -> Job:
        if self.steps is None and self.epochs is None and self.until is None:
            object.__setattr__(self, "epochs", 1)
        return self

    def folders(self, here: str | Path = ".") -> tuple[str | Path, ...]:
        """Where files and modules of `task` are looked for, in this order. ``here``: the working folder."""
        return (*self.python_path, here)

    def resized_rate(self, growth: float) -> float:
        """The factor for learning rates if a step has ``growth`` times as many samples as with the workers of the file."""
        return {"keep": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[self.on_resize]

    @property
    def port_range(self) -> tuple[int, int] | None:
        """The first and the last port that processes may listen on; ``None``: any port."""
        if self.ports is None:
            return None
        first, _, last = self.ports.partition("-")
        return int(first), int(last)

    @property
    def checkpoint_steps(self) -> int:
        """Steps between checkpoints; 0 if there are none, or if they are set by time."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else 0

    @property
    def checkpoint_s(self) -> float | None:
        """Seconds between checkpoints, if they are set by time; otherwise ``None``."""
        return seconds_of(self.checkpoint_every)

    @property
    def timeout_s(self) -> float:
        """The time-out in seconds."""
        return self.timeout

    @property
    def timeouts(self) -> Timeouts:
        """All time-outs of the run."""
        return Timeouts.of(self.timeout)
