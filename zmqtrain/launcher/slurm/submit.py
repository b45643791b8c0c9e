"""``zmqtrain launch FILE --engine slurm --submit``: a batch script from a template, and its job."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from zmqtrain.errors import UsageError
from zmqtrain.launcher.slurm.allocation import ask
from zmqtrain.topology.schema import Topology

#: Files in the run directory: the job, as JSON, and the script that was submitted.
JOB_FILE, SCRIPT_FILE = "slurm.json", "slurm.sbatch"
#: How often a job is requeued after a failure that may be temporary. After a checkpoint it is always requeued.
RESTARTS = 3
_WORD = re.compile(r"\{\{(\w+)\}\}")
#: The options that every job needs: without them, a template would train elsewhere, or never resume.
_NEEDED = ("command",)


@dataclass(frozen=True, slots=True)
class Submission:
    """The facts from which a batch script for ``sbatch`` is written."""

    topology: Topology
    """The topology, with hosts that stand for nodes."""
    folder: Path
    """The folder in which the job launches."""
    directory: Path
    """The run directory."""
    command: tuple[str, ...]
    """The command that launches, in the job."""

    def words(self) -> dict[str, str]:
        """The values of a template's words."""
        topology, asked = self.topology, self.topology.engine.slurm
        slots = max(host.slots for host in topology.hosts)
        return {
            "name": topology.job.name,
            "nodes": str(len(topology.hosts)),
            "cpus": str(asked.cpus or slots),
            "directory": str(self.directory.absolute()),
            "folder": shlex.quote(str(self.folder.absolute())),
            "command": shlex.join(self.command),
            "restarts": str(RESTARTS),
        }

    def options(self) -> list[str]:
        """The options of ``sbatch`` that the file requests besides those that every job needs."""
        asked = self.topology.engine.slurm
        given = {
            "gpus-per-node": str(asked.gpus) if asked.gpus else None,
            "mem": None if asked.memory is None else f"{math.ceil(asked.memory / 2**20)}M",
            "time": None if asked.time is None else _minutes(asked.time),
            "partition": asked.partition,
            "account": asked.account,
            **asked.options,
        }
        return [f"--{name}" if value == "" else f"--{name}={value}" for name, value in given.items() if value is not None]


def render(template: str, submission: Submission) -> str:
    """The batch script. A line with ``{{options}}`` is repeated for each of them.

    Raises `UsageError` for an unknown word, or for a template without ``{{command}}``."""
    words = submission.words()
    missing = [word for word in _NEEDED if f"{{{{{word}}}}}" not in template]
    if missing:
        raise UsageError(f"the template has no {{{{{missing[0]}}}}}, which starts the launcher")
    lines: list[str] = []
    for number, line in enumerate(template.splitlines(), 1):
        if "{{options}}" in line:
            lines += [line.replace("{{options}}", option) for option in submission.options()]
            continue
        unknown = [word for word in _WORD.findall(line) if word not in words]
        if unknown:
            known = ", ".join([*words, "options"])
            raise UsageError(f"line {number} of the template has {{{{{unknown[0]}}}}}, which is unknown; known words are {known}")
        lines.append(_WORD.sub(lambda match: words[match[1]], line))
    return "\n".join(lines) + "\n"


def read_template(path: Path | None) -> str:
    """Read the user's template, or the default one (``launch/slurm.sbatch``). Raises `UsageError`."""
    if path is None:
        return files("zmqtrain.launcher.slurm").joinpath("job.sbatch").read_text("utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--template {path} cannot be read: {error}") from error


def submit(script: str, directory: Path) -> str:
    """Submit the script, and note the job in the run directory. Returns the job's number. Raises `UsageError`."""
    path = directory / SCRIPT_FILE
    path.write_text(script, encoding="utf-8")
    job = ask("sbatch", "--parsable", str(path.absolute())).strip().partition(";")[0]
    (directory / JOB_FILE).write_text(json.dumps({"job": job}) + "\n", encoding="utf-8")
    return job


def job_of(directory: Path) -> str | None:
    """The job as which a run was submitted; ``None`` if it was not."""
    try:
        return str(json.loads((directory / JOB_FILE).read_text(encoding="utf-8"))["job"])
    except FileNotFoundError:
        return None


def state_of(job: str) -> str | None:
    """The state of a job in Slurm's words (``pending``, ``running``, ...); ``None`` if Slurm has forgotten it, or is not here."""
    try:
        return ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip().lower() or None
    except UsageError:
        return None


def cancel(job: str) -> None:
    """Cancel a job. If it is running, it stops with a checkpoint first, provided that this takes less than Slurm's ``KillWait``."""
    ask("scancel", job)


def job_command(
    file: Path,
    script: Sequence[str],
    *,
    python: str,
    directory: Path,
    settings: Sequence[str],
    data: str | None,
    resume: str | None,
    json_lines: bool,
) -> tuple[str, ...]:
    """The launch command of a job: the one that the user gave, in the job's run directory. It can be run again after a requeue."""
    words = [python, "-m", "zmqtrain", "launch", "--engine=slurm", f"--run-dir={directory.absolute()}", "--continue"]
    words += [f"--set={setting}" for setting in settings]
    words += [f"--data={data}"] if data is not None else []
    words += [f"--resume={resume}"] if resume is not None else []
    words += ["--json"] if json_lines else []
    return (*words, str(file.absolute()), *script)


def _minutes(seconds: float) -> str:
    """A time in the form of ``sbatch --time``: hours, minutes and seconds, rounded up."""
    whole = math.ceil(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
