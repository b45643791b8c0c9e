"""``slurm`` in ``[engine]``: what a job requests from Slurm."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from zmqtrain.topology import units
from zmqtrain.topology.section import Section, Written

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
#: Options that the batch script sets itself, or that have a key of their own.
_OURS = {
    "job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "time", "partition", "account",
    "output", "error", "open-mode", "requeue", "no-requeue", "signal", "chdir", "wrap", "parsable", "array", "export",
}  # fmt: skip

#: The time limit of a job: from a minute, Slurm's own unit, to a year.
WallTime = Annotated[
    float, BeforeValidator(units.duration(60, 366 * 86_400)), PlainSerializer(units.format_duration), Written(("4 h", "90 min"))
]
#: The memory of a node.
Memory = Annotated[
    int, BeforeValidator(units.size(2**20, 2**50)), PlainSerializer(units.format_size), Written(("64 GiB", "8000 MiB"))
]


def _word(value: str) -> str:
    if value.startswith("-") or not value.isprintable() or any(character.isspace() for character in value):
        raise ValueError("must be one word that does not begin with '-'")
    return value


def _options(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not _OPTION.fullmatch(name) or not value.isprintable():
            raise ValueError(
                f'contains {name!r}, which is not an option of sbatch: write its long name, like {{ constraint = "ib" }}}}'
            )
        if name in _OURS:
            raise ValueError(f"contains {name}, which zmqtrain sets itself, or which has a key of its own in this section")
    return values


class SlurmSection(Section):
    """What a job requests from Slurm. Inside an existing allocation these settings are not used."""

    nodes: int = Field(
        default=1, ge=1, le=65_536, description="Number of nodes. If the file has `[[hosts]]`, their number is used instead."
    )
    cpus: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Processors on each node. Default: the largest `slots` of `[[hosts]]`, or one for each thread of the workers.",
    )
    gpus: int = Field(default=0, ge=0, le=1024, description="GPUs on each node.")
    memory: Memory | None = Field(default=None, description="Memory on each node. Default: Slurm's.")
    time: WallTime | None = Field(default=None, description="Time limit of the job. Default: the partition's.")
    partition: Annotated[str, AfterValidator(_word)] | None = Field(
        default=None, min_length=1, description="Partition to submit to."
    )
    account: Annotated[str, AfterValidator(_word)] | None = Field(default=None, min_length=1, description="Account to charge.")
    options: Annotated[dict[str, str], AfterValidator(_options)] = Field(
        default_factory=dict,
        description='Further options of `sbatch`, by their long names: `{ constraint = "ib", exclusive = "" }`.',
    )
