"""``groups = "auto"`` in a launch: find groups, momentum and learning rate, train with them, and check that they stay suitable.

First it is measured how long an update takes with each number of groups. From that follows how long the job takes, and so how long
may be searched: where it is too short for any search, it trains with g* groups at once. Else the search is that of `zmqtrain tune`.
Where it would train, the job itself does, for as long as the file says. Staleness and momentum are watched meanwhile: where they
are no longer what the setting was chosen for, the run is stopped at its next checkpoint, tuned again from there, and goes on with
what is left of it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from zmqtrain.errors import ConnectivityError, UsageError, ZmqTrainError
from zmqtrain.experiment.job import JobError, JobRuns, rest
from zmqtrain.experiment.runs import Folders, LaunchedRuns
from zmqtrain.experiment.tuning import Reporter, Tuning, again, require_trials, search_folder, searched, with_compression
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.launcher.prepared import Prepared
from zmqtrain.launcher.signals import sigterm_interrupts
from zmqtrain.observe.run_directory import find_run
from zmqtrain.plan.efficiency import fewest
from zmqtrain.run.preemption import INTERRUPTED
from zmqtrain.topology.schema import Topology
from zmqtrain.train.task import task_of_job
from zmqtrain.tune.job import space_for
from zmqtrain.tune.search import Search
from zmqtrain.tune.space import Space
from zmqtrain.tune.speeds import Speeds
from zmqtrain.tune.trial import SearchDecision

#: Steps of each group in which the speed is measured: the first ones are slower than those to come.
SPEED = 8


@sigterm_interrupts()
def launch_tuned(
    file: Path,
    topology: Topology,
    emulation: Emulation | None,
    shown: Reporter,
    *,
    json_lines: bool,
    data: str | None,
    resume: str | None,
    run_dir: Path | None,
    prepared: Prepared | None = None,
) -> int:
    """Tune and train; returns the exit code. ``shown``: reports the progress. ``resume``: the folder of an earlier launch to
    continue. ``prepared``: what all runs fork their roles from, where the hosts are this machine.

    Raises what `TuningRun.run` does.
    """
    if topology.job.task is None:
        raise UsageError(f'{file}: groups = "auto" needs [job] task: a search needs losses')
    require_trials(file, topology)
    topology = with_compression(topology, file.resolve().parent, data, shown)
    space = searched(topology, data, measured=True)
    begun = None if resume is None else Path(resume) if Path(resume).is_dir() else find_run(resume)
    with search_folder(topology, "auto", resume=begun, run_dir=run_dir) as directory:
        shown.begin(topology, space, directory.path)

        def probes_of(name: str) -> LaunchedRuns:
            return LaunchedRuns(topology, Folders(directory.path / name), data, str(file.resolve().parent), emulation, prepared)

        job = JobRuns(probes_of("omnivore"), directory.path, json_lines, updates_of(topology, data))
        tuning = Tuning(topology, space, directory, shown)
        status, code = "failed", ZmqTrainError.exit_code
        try:
            limited = topology.tune.time_limit is not None  # then the file says how long it may take
            speeds = tuning.resumed("speeds", Speeds(replace(space, speed=SPEED), None if limited else job.updates))
            tuning.drive("speeds", speeds, probes_of("speeds"))
            code = _trained(tuning, job, space, speeds)
            status = "done" if code == 0 else status
        except JobError as error:
            code = error.code
            if code >= ConnectivityError.exit_code:  # worth another try
                shown.note(again(directory.path))
        except KeyboardInterrupt:
            status, code = "interrupted", INTERRUPTED
            shown.note(f"interrupted; {again(directory.path)}")
        except ZmqTrainError as error:
            code = error.exit_code
            if isinstance(error, ConnectivityError):
                shown.note(again(directory.path))
            raise
        finally:
            tuning.compare(job.summary(status, code))
    return code


def _trained(tuning: Tuning, job: JobRuns, space: Space, speeds: Speeds) -> int:
    """Search, if that is worthwhile, and train to the job's end. Returns the exit code."""
    if speeds.too_short is not None:
        groups = fewest(speeds.known)
        reason = "the most groups that still make it faster (g*), with the task's learning rate and [optimizer] momentum"
        tuning.decide("speeds", SearchDecision("setting", reason, {"groups": groups}))
        job.train_plainly(groups)
        return 0
    machine = tuning.resumed("omnivore", Search(space_for(space, speeds.known, job_s=speeds.job_s(), spent_s=speeds.search_s)))
    done = tuning.drive("omnivore", machine, job)
    if done.setting is not None and not job.through:
        job.train_rest(rest(machine, done.setting, done.reason))
        done = replace(done, reason=f"{done.reason} for searching; the job was trained to its end", reached=True)
    tuning.end("omnivore", machine, done)
    return 0 if job.through else ZmqTrainError.exit_code


def updates_of(topology: Topology, data: str | None) -> int | None:
    """The number of the job's updates. ``steps`` are those of all groups together, like those of the one group in the file."""
    job = topology.job
    if job.until is not None:
        return None
    if job.steps is not None:
        return job.steps
    samples = task_of_job(job, data).training().samples
    return math.ceil((job.epochs or 1) * samples / topology.compute.batch_size)
