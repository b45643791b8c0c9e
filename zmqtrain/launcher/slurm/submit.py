"""``zmqtrain launch FILE --engine slurm --submit``: a batch script from a template, and the job that it becomes."""

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

#: In the run directory: the job, as JSON, and the script that was submitted.
JOB_FILE, SCRIPT_FILE = "slurm.json", "slurm.sbatch"
#: How often a job is requeued whose run failed in a way that is worth another try. After a checkpoint it always is.
RESTARTS = 3
_WORD = re.compile(r"\{\{(\w+)\}\}")
#: What no job can do without: a template that forgets it would train elsewhere, or never again.
_NEEDED = ("command",)


@dataclass(frozen=True, slots=True)
class Submission:
    """What the batch script is to do."""

    topology: Topology
    """With hosts that stand for nodes."""
    folder: Path
    """Where it launches."""
    directory: Path
    """The run directory."""
    command: tuple[str, ...]
    """The launch, in the job."""

    def words(self) -> dict[str, str]:
        """What a template's words stand for."""
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
        """What the file asks for beside what every job needs, as options of ``sbatch``."""
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

    Raises `UsageError` for a word that means nothing, or a template without ``{{command}}``."""
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
            raise UsageError(f"line {number} of the template has {{{{{unknown[0]}}}}}, which means nothing; known are {known}")
        lines.append(_WORD.sub(lambda match: words[match[1]], line))
    return "\n".join(lines) + "\n"


def read_template(path: Path | None) -> str:
    """A template of the user's own, or the one that comes along (``launch/slurm.sbatch``). Raises `UsageError`."""
    if path is None:
        return files("zmqtrain.launcher.slurm").joinpath("job.sbatch").read_text("utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--template {path} cannot be read: {error}") from error


def submit(script: str, directory: Path) -> str:
    """Submit the script, and leave word of it in the run directory. Returns the job's number. Raises `UsageError`."""
    path = directory / SCRIPT_FILE
    path.write_text(script, encoding="utf-8")
    job = ask("sbatch", "--parsable", str(path.absolute())).strip().partition(";")[0]
    (directory / JOB_FILE).write_text(json.dumps({"job": job}) + "\n", encoding="utf-8")
    return job


def job_of(directory: Path) -> str | None:
    """The job that a run was submitted as; ``None`` where it was not."""
    try:
        return str(json.loads((directory / JOB_FILE).read_text(encoding="utf-8"))["job"])
    except FileNotFoundError:
        return None


def state_of(job: str) -> str | None:
    """How a job is, in Slurm's words (``pending``, ``running``, ...); ``None`` where Slurm has forgotten it, or is not here."""
    try:
        return ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip().lower() or None
    except UsageError:
        return None


def cancel(job: str) -> None:
    """End a job, wherever it is. One that runs stops with a checkpoint first, if that is done within Slurm's ``KillWait``."""
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
    """The launch that a job does: the same as was asked for, in its run directory, again and again."""
    words = [python, "-m", "zmqtrain", "launch", "--engine=slurm", f"--run-dir={directory.absolute()}", "--continue"]
    words += [f"--set={setting}" for setting in settings]
    words += [f"--data={data}"] if data is not None else []
    words += [f"--resume={resume}"] if resume is not None else []
    words += ["--json"] if json_lines else []
    return (*words, str(file.absolute()), *script)


def _minutes(seconds: float) -> str:
    """As ``sbatch --time`` takes it: hours, minutes and seconds, rounded up."""
    whole = math.ceil(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
