"""``[job]``: what is trained, for how long, and what happens when something goes wrong."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from zmqtrain.topology.section import MOST, Every, Section, Texts, Timeout, is_plain, seconds_of

_TASK = re.compile(r"[^:]+(:[A-Za-z_]\w*)?")
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"


def _task(value: str) -> str:
    if not _TASK.fullmatch(value):
        raise ValueError('is no task: write "package.module:function" or "path/to/file.py:function"')
    return value


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    for key, item in value.items():
        if not is_plain(item):
            raise ValueError(f"cannot pass {key} to the task: use texts, numbers, booleans, arrays and tables")
    return value


def _ports(value: str) -> str:
    first, mark, last = value.partition("-")
    if not (mark and first.isdecimal() and last.isdecimal() and 0 < int(first) < int(last) < 65536):
        raise ValueError('is no range of ports: write it like "29400-29500"')
    return value


def _steps_or_time(value: int | str) -> int | str:
    if isinstance(value, int) and not 0 <= value <= MOST:
        raise ValueError(f"must be from 0 to {MOST} steps")
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


class Until(Section):
    """Train until an evaluation metric is good enough."""

    metric: str = Field(min_length=1, description="Name of the evaluation metric to watch, like `eval_accuracy`.")
    reaches: Annotated[float, AfterValidator(_finite)] = Field(
        description="Training ends at the first evaluation where the metric is at least this (at most, if `loss` is in its name)."
    )
    max_steps: int | None = Field(default=None, ge=1, le=MOST, description="Give up after this many steps of a group.")


class Job(Section):
    """What is trained, and for how long."""

    name: str = Field(
        default="job",
        pattern=NAME_PATTERN,
        description="Name of the run's directory, `runs/NAME-NNN`. Default: the topology file's name without its ending.",
    )
    task: Annotated[str, AfterValidator(_task)] | None = Field(
        default=None,
        description="A function that returns a `zmqtrain.Task`: `package.module:function` or `path/file.py:function`; "
        "without `:function` it is called `task`. "
        "Left out when a script of your own is launched.",
    )
    args: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(
        default_factory=dict, description="Keyword arguments for the task function."
    )
    python_path: Texts = Field(default=(), description="Folders to put in front of Python's search path in every process.")
    seed: int = Field(
        default=1, ge=0, lt=2**63, description="Fixes initial weights, data order and every other random choice of the run."
    )
    steps: int | None = Field(default=None, ge=1, le=MOST, description="Train this many steps of each group.")
    epochs: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="Train this many passes over the training data. One pass if none of the three is given.",
    )
    until: Until | None = Field(default=None, description="Train until a metric is reached.")
    weights: str | None = Field(
        default=None,
        min_length=1,
        description="A run, its `model.safetensors` (or any such file), a checkpoint or a folder with checkpoints: begin with its "
        "model's parameters instead of new ones, and with nothing else of it. The run may have another shape than the one that "
        "wrote it.",
    )
    eval_every: int = Field(default=0, ge=0, le=MOST, description="Steps between evaluations; 0: only at the end.")
    checkpoint_every: Annotated[Every, AfterValidator(_steps_or_time)] = Field(
        default="10 min",
        description="Steps between checkpoints, or the time between them. The end of a run is a checkpoint, too. 0: none; then the "
        "run leaves its model, but cannot be resumed.",
    )
    keep_checkpoints: int = Field(default=2, ge=1, le=MOST, description="How many of the latest checkpoints stay on disk.")
    timeout: Timeout = Field(
        default=60.0,
        description="The one number that all time-outs derive from, in seconds or with a unit; `zmqtrain check` prints the ladder.",
    )
    on_nan: Literal["stop", "continue"] = Field(
        default="stop", description="A loss that is NaN or infinite stops the run with a checkpoint of the last good step, or not."
    )
    elastic: bool | None = Field(
        default=None,
        description="Go on without workers that are lost (killed, or with their host), and let others come in their place. "
        "Default: with gossip among groups of one worker.",
    )
    restarts: int = Field(
        default=0, ge=0, le=1000, description="How often each worker of an elastic run is started again after it was lost."
    )
    port: int = Field(default=0, ge=0, le=65535, description="The coordinator's TCP port; 0: any free one.")
    ports: Annotated[str, AfterValidator(_ports)] | None = Field(
        default=None,
        description="The TCP ports that all processes of the run listen at, like `29400-29500`, for firewalls: each takes two. "
        "Left out: any free ones.",
    )
    transport_encryption: Literal["auto", "required", "disabled"] = Field(
        default="auto",
        description="Encrypt what goes over the network, and let in only who belongs to the run. auto: as soon as a host's address "
        "is not this machine's own; emulated hosts are on this machine. required: always, also among processes of one machine "
        "(never over shared memory). disabled: never, on a network that you trust.",
    )
    oversubscribe: bool = Field(default=False, description="Allow more workers than slots; they then share the processors.")

    @model_validator(mode="after")
    def _one_pass_by_default(self) -> Job:
        if self.steps is None and self.epochs is None and self.until is None:
            object.__setattr__(self, "epochs", 1)
        return self

    @property
    def port_range(self) -> tuple[int, int] | None:
        """The first and the last port that processes may listen at; ``None``: any."""
        if self.ports is None:
            return None
        first, _, last = self.ports.partition("-")
        return int(first), int(last)

    @property
    def checkpoint_steps(self) -> int:
        """Steps between checkpoints; 0 where there are none, or a time is between them."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else 0

    @property
    def checkpoint_s(self) -> float | None:
        """Seconds between checkpoints, if a time is between them."""
        return seconds_of(self.checkpoint_every)

    @property
    def timeout_s(self) -> float:
        """The time-out in seconds."""
        return self.timeout
