"""One search of a job's settings, from its folder to its results: what `zmqtrain tune` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zmqtrain.errors import ConnectivityError, ZmqTrainError
from zmqtrain.experiment.runs import Folders, LaunchedRuns, Runs, SimulatedRuns
from zmqtrain.experiment.tuning import Reporter, Tuning, again, search_folder, searched, with_compression
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.launcher.prepared import Prepared
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
    """Run trials on virtual time."""
    emulation: Emulation | None = None
    measured: bool = True
    """Whether updates may take other times than the planner predicts."""
    prepared: Prepared | None = None
    """What all runs fork their roles from, where the hosts are this machine."""

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
            shown: reports the progress.
            strategies: one after another.
            curves: the trade-off over groups instead.
            resume: the folder of a search to continue.
            run_dir: the folder of a new one; ``None``: the next free one.

        Raises:
            UsageError: ``resume`` is not such a folder.
            TaskError: the task's own code fails.
            ZmqTrainError: the error by which a trial fails.
        """
        topology = with_compression(self.topology, self.folder, self.data, shown)
        space = searched(topology, self.data, measured=self.measured)
        dilation = None if self.measured or self.emulation is None else self.emulation.dilation.factor
        with search_folder(topology, "tune", resume=resume, run_dir=run_dir) as directory:
            shown.begin(topology, space, directory.path)
            tuning = Tuning(topology, space, directory, shown, dilation=dilation)
            try:
                if curves:
                    tuning.curves(self._runs(topology, "curves", directory.path))
                    return 0
                for name in strategies:
                    tuning.strategy(name, self._runs(topology, name, directory.path))
                tuning.compare()
                return tuning.exit_code
            except KeyboardInterrupt:
                tuning.ended_early("interrupted", INTERRUPTED)
                shown.note(f"interrupted; {again(directory.path)}")
                return INTERRUPTED
            except ZmqTrainError as error:
                tuning.ended_early("failed", error.exit_code)
                if isinstance(error, ConnectivityError):
                    shown.note(again(directory.path))
                raise

    def _runs(self, topology: Topology, name: str, folder: Path) -> Runs:
        folders = Folders(folder / name)
        if self.simulate:
            return SimulatedRuns(topology, folders, self.data)
        return LaunchedRuns(topology, folders, self.data, str(self.folder), self.emulation, self.prepared)
