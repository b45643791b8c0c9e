"""One search of a job's settings, from its folder to its results: what `zmqtrain tune` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zmqtrain.errors import ConnectivityError
from zmqtrain.experiment.runs import Folders, LaunchedRuns, Runs, SimulatedRuns
from zmqtrain.experiment.tuning import Reporter, Tuning, again, begun, searched
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.launcher.run import write_pid
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.run.preemption import INTERRUPTED
from zmqtrain.topology.schema import Topology
from zmqtrain.tune.baselines import StrategyName


@dataclass(frozen=True, slots=True)
class TuningRun:
    """What is searched, and in which world its trials are run."""

    topology: Topology
    folder: Path
    """From where the task is imported."""
    data: str | None
    """Where the task finds its data."""
    simulate: bool = False
    """On virtual time."""
    emulation: Emulation | None = None
    measured: bool = True
    """Whether updates take other times than the planner knows."""

    def run(
        self,
        shown: Reporter,
        strategies: Sequence[StrategyName],
        *,
        curves: bool = False,
        resume: Path | None = None,
        run_dir: Path | None = None,
    ) -> int:
        """Run the strategies, or all numbers of groups to the target (``curves``). Returns the exit code.

        Args:
            shown: who is told.
            strategies: one after another.
            curves: the trade-off over groups instead.
            resume: the folder of a search that is to go on.
            run_dir: the folder of a new one; ``None``: the next free one.

        Raises:
            UsageError: ``resume`` is no such folder.
            TaskError: the task's own code fails.
            ZmqTrainError: what a trial fails by.
        """
        topology = self.topology
        space = searched(topology, self.data, measured=self.measured)
        if resume is None:
            directory = RunDirectory.create(f"{topology.job.name}-tune", exact=run_dir)
            directory.write("topology.toml", topology.to_toml())
        else:
            directory = begun(resume)
        write_pid(directory)
        shown.begin(topology, space, directory.path)
        dilation = None if self.measured or self.emulation is None else self.emulation.dilation.factor
        tuning = Tuning(topology, space, directory, shown, dilation=dilation)
        try:
            if curves:
                tuning.curves(self._runs("curves", directory.path))
            else:
                for name in strategies:
                    tuning.strategy(name, self._runs(name, directory.path))
                tuning.compare()
                return tuning.exit_code
        except KeyboardInterrupt:
            shown.note(f"interrupted; {again(directory.path)}")
            return INTERRUPTED
        except ConnectivityError:
            shown.note(again(directory.path))
            raise
        finally:
            (directory.path / "pid").unlink(missing_ok=True)
            directory.close()
        return 0

    def _runs(self, name: str, folder: Path) -> Runs:
        folders = Folders(folder / name)
        if self.simulate:
            return SimulatedRuns(self.topology, folders, self.data)
        return LaunchedRuns(self.topology, folders, self.data, str(self.folder), self.emulation)
