"""``zmqtrain profile``: measure a task's model, this machine and the network between hosts."""

from __future__ import annotations

import json
import platform
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zmqtrain.cli.emulation import emulation_of
from zmqtrain.cli.overrides import load_with
from zmqtrain.cli.profile_tables import print_links, print_profile, rows
from zmqtrain.errors import UsageError
from zmqtrain.processors import processors
from zmqtrain.strict_json import dumps
from zmqtrain.topology.schema import Topology
from zmqtrain.train.data_path import data_path_of

if TYPE_CHECKING:
    from zmqtrain.train.device.profile import Profile


def run_profile(
    target: str,
    *,
    out: Path | None = None,
    batches: str | None = None,
    batch: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    links: bool = False,
    emulate: bool = False,
    shaping: str | None = None,
    data: str | None = None,
    seconds: float = 1.0,
    json_lines: bool = False,
    settings: Sequence[str] = (),
) -> int:
    """Measure, print, and write a profile to ``out``. Returns the exit code.

    ``target``: a topology file, or a task as ``[job] task`` names it. ``links``: measure the network between the file's hosts
    instead of its model; if ``out`` is already a profile, the links are added to it. Raises `UsageError`, before anything is
    measured, if something cannot be measured, and `TaskError` if the task's own code fails.
    """
    topology = _topology(target, settings)
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out} cannot be written: there is no folder {out.absolute().parent}")
    if links or emulate:
        return _links(topology, target, out, emulate=emulate, shaping=shaping, json_lines=json_lines)
    if shaping is not None:
        raise UsageError("--shaping is for emulated links: add --links --emulate")
    sizes = _numbers(batches)
    profile = _measured(topology, target, sizes, batch, threads, device, data, seconds, quiet=json_lines)
    if out is not None:
        if out.is_file():
            profile = _with_links_of(profile, out)
        _write(out, profile)
    if json_lines:
        for row in rows(profile):
            print(dumps(row))
    else:
        print_profile(profile, None if out is None else str(out))
    return 0


def _topology(target: str, settings: Sequence[str]) -> Topology:
    """The topology of the file, or one that has only the task."""
    if target.endswith(".toml"):
        return load_with(Path(target), settings)
    if Path(target).is_dir():
        run = (Path(target) / "topology.toml").is_file()
        hint = f"; zmqtrain report {target} shows where the time of this run went" if run else ""
        raise UsageError(f"{target} is a folder: give a topology file, or a task as FILE.py:FUNCTION{hint}")
    if settings:
        raise UsageError("--set overrides values of a topology file: give a file instead of a task")
    source = target.rpartition(":")[0] or target
    name = Path(source).stem if source.endswith(".py") else source.rpartition(".")[2]
    name = "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")
    return Topology.model_validate({"job": {"name": name or "task", "task": target}})


def _measured(
    topology: Topology,
    target: str,
    sizes: tuple[int, ...],
    batch: int | None,
    threads: int | None,
    device: str | None,
    data: str | None,
    seconds: float,
    *,
    quiet: bool,
) -> Profile:
    from zmqtrain.heap import keep_memory
    from zmqtrain.plan.measure.model import ModelBench
    from zmqtrain.plan.measure.profile import Asked, profile_task
    from zmqtrain.plan.measure.timing import Patience
    from zmqtrain.train.device.make import device_named
    from zmqtrain.train.task import task_of_job

    job, compute = topology.job, topology.compute
    if job.task is None:
        raise UsageError(f"{target} names no task, so there is no model to measure: add [job] task")
    wanted = device or ("auto" if compute.device == "modelled" else compute.device)
    where = device_named(wanted)
    if where.type == "cpu" and compute.keep_memory:
        keep_memory()
    path = data_path_of(data, topology)
    task = task_of_job(job, path)
    bench = ModelBench(task, where, precision=compute.precision, channels_last=compute.channels_last, seed=job.seed)
    given = target.endswith(".toml")
    asked = Asked(
        batches=sizes,
        # For a topology file, layers are timed with a worker's part of the batch, since that is what modelled devices compute.
        batch=batch or (max(1, compute.batch_size // compute.columns) if given else 0),
        threads=threads or compute.threads,
        processors=max(1, min(topology.hosts[0].slots, processors())),
        patience=Patience(seconds),
    )

    def say(text: str) -> None:
        if not quiet:
            print(f"measuring: {text}", file=sys.stderr, flush=True)

    return profile_task(bench, asked, name=job.name, host=platform.node(), say=say)


def _links(topology: Topology, target: str, out: Path | None, *, emulate: bool, shaping: str | None, json_lines: bool) -> int:
    from zmqtrain.launcher.links import measure_links
    from zmqtrain.net.loop import run
    from zmqtrain.train.device.profile import Profile

    if not target.endswith(".toml"):
        raise UsageError("--links measures between the hosts of a topology file: give a file instead of a task")
    emulation = emulation_of(topology, emulate, shaping, None)
    profile = Profile.load(out) if out is not None and out.is_file() else None
    work = measure_links(
        topology, emulation, token=secrets.token_hex(16), say=lambda text: print(text, file=sys.stderr, flush=True)
    )
    found = run(work, dilation=None if emulation is None else emulation.dilation)
    if profile is not None and out is not None:
        measured = profile.known()
        _write(out, replace(profile, measured=replace(measured, hosts=found.hosts, links=found.links)))
    elif out is not None:
        raise UsageError(
            f"--out {out}: links are added to an existing profile, but this file does not exist: make the "
            "profile first, without --links"
        )
    if json_lines:
        for row in found.rows():
            print(dumps(row))
    else:
        print_links(found, None if out is None else str(out))
    return 0


def _with_links_of(profile: Profile, out: Path) -> Profile:
    """Keep the links and hosts of the old file, if it is a profile of this task."""
    from zmqtrain.train.device.profile import Profile

    try:
        before = Profile.load(out)
    except UsageError:
        return profile
    if before.name != profile.name or before.measured is None or not before.measured.links:
        return profile
    return replace(profile, measured=replace(profile.known(), links=before.measured.links, hosts=before.measured.hosts))


def _numbers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if list(numbers) != sorted(set(numbers)) or numbers[0] < 1 or numbers[-1] > 2**24:
        raise UsageError(f"--batches {text}: write increasing numbers from 1 on, separated by commas, like 8,32,128")
    return numbers


def _write(out: Path, profile: Profile) -> None:
    try:
        out.write_text(json.dumps(profile.to_values(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error}") from error
