"""``[compute]``: how many workers there are, how they are grouped, and how each computes a step."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, field_validator, model_validator

from zmqtrain.topology.section import ByteSize, Section, Texts

#: A grid, such as ``2x4``.
GRID = r"^[1-9]\d{0,3}x[1-9]\d{0,3}$"


def _not_auto(value: Any) -> Any:
    if value == "auto":
        raise ValueError('must be a number, because with groups = "auto" it is the number of all workers together')
    return value


def _parts(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(float(weight) if isinstance(weight, int) and not isinstance(weight, bool) else weight for weight in value)
    if value not in ("even", "measured"):
        raise ValueError('must be "even", "measured", or a list of weights like [2, 1]')
    return value


def _grid(value: Any) -> Any:
    if isinstance(value, str) and value != "auto" and re.match(GRID, value) is None:
        raise ValueError('is not a grid: write "PRxPC", like "1x2", or "auto"')
    return value


def rows_and_columns(grid: str) -> tuple[int, int]:
    """The numbers Pr and Pc of a grid written like ``2x4``."""
    rows, columns = grid.split("x")
    return int(rows), int(columns)


class Noise(Section):
    """How a modelled device's times vary. They are drawn from the job's seed for each step of each worker."""

    kind: Literal["constant", "normal", "exponential"] = Field(
        default="constant", description="The distribution; its mean is the profile's time."
    )
    spread: float = Field(default=0.1, ge=0, le=10, description="normal: the standard deviation as a fraction of the mean.")
    straggler_chance: float = Field(
        default=0.0, ge=0, le=1, description="Probability that a step takes `straggler_factor` times as long."
    )
    straggler_factor: float = Field(default=3.0, ge=1, le=1000, description="How many times as long such a step takes.")


class Compute(Section):
    """The workers, their groups, and how a step is computed."""

    groups: Annotated[int, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]})] = Field(
        default=1,
        ge=1,
        le=65536,
        description="Number of compute groups, each of which processes its own batches. If neither this nor `group_size` is "
        "given: one worker on each of the hosts' `devices`, or else one worker on each host with all its slots as "
        "threads, all in one synchronous group (with gossip and averaging, each worker is a group of its own). auto: "
        "`zmqtrain launch` finds the number, together with momentum and learning rate, before it trains (see "
        "`[tune]`); `group_size` is then the total number of workers.",
    )
    auto_groups: bool = Field(default=False, description='Set by `groups = "auto"`, which starts with one group.')
    group_size: Annotated[int, BeforeValidator(_not_auto), WithJsonSchema({"type": "integer", "minimum": 1})] = Field(
        default=1,
        ge=1,
        le=65536,
        description="Workers in a group; together they process one batch synchronously. Workers are spread evenly over the slots "
        "of all hosts. If there are at least as many groups as hosts, a group stays on one host as long as one has "
        "room for it.",
    )
    batch_size: int = Field(
        default=64,
        ge=1,
        le=2**31,
        description="Samples per step of a group, divided among its workers. The parts may be unequal; each counts in proportion "
        "to its samples.",
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        le=64,
        description="With `merged_fc`: number of groups that share their slots and take turns, so that one computes while the FC "
        "server works on another's batch. The number of groups must be a multiple of it.",
    )
    parts: Annotated[
        Annotated[Literal["even", "measured"], Tag("word")]
        | Annotated[tuple[Annotated[float, Field(gt=0, le=1e9)], ...], Tag("weights")],
        Discriminator(lambda value: "word" if isinstance(value, str) else "weights"),
        BeforeValidator(_parts),
    ] = Field(
        default="even",
        description="How workers that wait for each other (those of a group; with allreduce and synchronous model servers, those "
        "of all groups) divide the batch. even: equally. measured: in proportion to their measured speeds, updated "
        "every `rebalance_every` steps. Or a list of weights such as `[2, 1]`, one for each worker of a group or of "
        "all groups. However the batch is divided, every sample counts the same. Default if the file does not "
        "mention groups and hosts differ: in proportion to their slots (measured, if only some hosts have devices).",
    )
    rebalance_every: int = Field(
        default=50,
        ge=1,
        le=2**31,
        description='With `parts = "measured"`: steps between updates of the parts; the first ones come earlier.',
    )
    grid: Annotated[str, BeforeValidator(_grid)] | None = Field(
        default=None,
        description="The group's shape, Pr x Pc: Pr divides the model or the images, as `[parallel]` says; Pc divides the batch. "
        "Default: 1xN for a group of N workers (data parallelism). auto: the grid and plan that `zmqtrain plan` "
        "finds.",
    )
    smaller_grids: Texts = Field(
        default=(),
        description="For elastic all-reduce on a `grid` of several rows: grids of fewer workers for the run after losses, "
        'like ["3x1", "1x2"], beside those with the rows of `grid` and fewer columns. It takes the one with the most workers of '
        "those that are left; of equal ones that with the rows of `grid`, and then the first one here.",
    )
    device: Literal["auto", "cpu", "cuda", "modelled"] = Field(
        default="auto",
        description="Where workers compute. auto: the host's devices in turn; or else CUDA where the machine has it; or else the "
        "CPU. modelled: no arithmetic, only the time that `profile` gives. With a task and `[simulation] payload = "
        '"real"`, a modelled device does the arithmetic as well, within that time (it runs on this CPU, so emulate '
        "with enough dilation).",
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="Type of the arithmetic (by autocast); parameters keep the model's own type. float16: losses are scaled as "
        "torch's GradScaler does it, and all workers that update together skip a step whose gradients overflow. "
        "float16 cannot be combined with a `grid` that divides the model, nor with `merged_fc`.",
    )
    accumulate: int = Field(
        default=1,
        ge=1,
        le=65536,
        description="Number of micro-batches into which a worker cuts its part of the batch, to save memory.",
    )
    bucket_size: ByteSize | None = Field(
        default=None,
        description="Approximate size of the buckets in which parameters travel. Default: 4 MiB; on several hosts, but "
        "for averaging, a quarter of the model if that is less, but at least 128 KiB.",
    )
    overlap: bool = Field(default=True, description="Exchange gradients while backward is still running.")
    shared_memory: bool = Field(
        default=True,
        description="Workers of one host sum their gradients in shared memory instead of sending them over the network.",
    )
    threads: int = Field(default=0, ge=0, le=1024, description="Threads of each worker. 0: an equal share of the host's slots.")
    channels_last: bool = Field(
        default=False,
        description="Pass images to the model in channels-last memory format, which many layers compute faster on CPUs (see "
        "`zmqtrain profile`). A model that calls `view` on images may need `reshape` instead.",
    )
    keep_memory: bool = Field(
        default=True,
        description="Workers on CPUs keep the memory that a step has freed for the next step, instead of returning it to the "
        "system and asking for it again page by page.",
    )
    profile: str | None = Field(
        default=None,
        min_length=1,
        description="Layer times of modelled devices: a JSON file, or the name of a shipped profile such as `resnet50`.",
    )
    noise: Noise = Field(default_factory=Noise, description="How the times of a modelled device vary.")

    @model_validator(mode="before")
    @classmethod
    def _automatic(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("groups") == "auto":
            return {**values, "groups": 1, "auto_groups": True}
        return values

    @field_validator("smaller_grids")
    @classmethod
    def _are_grids(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [each for each in value if re.match(GRID, each) is None]:
            raise ValueError(f'{wrong[0]!r} is not a grid: write "PRxPC", like "1x2"')
        return value

    @property
    def rows(self) -> int:
        """Pr, the number of workers that divide the model among them. (``auto`` is resolved before a run.)"""
        return 1 if self.grid in (None, "auto") else rows_and_columns(self.grid)[0]

    @property
    def columns(self) -> int:
        """Pc, the number of workers that divide the batch among them."""
        return self.group_size // self.rows

    def column_of(self, position: int) -> int:
        """The column of the grid (`zmqtrain.parallel.grid.Grid`) of the worker at this position in its group: the part of the
        group's samples that it has. Without a grid, the position."""
        return position // self.rows

    @property
    def workers(self) -> int:
        """The number of workers of all groups together."""
        return self.groups * self.group_size
