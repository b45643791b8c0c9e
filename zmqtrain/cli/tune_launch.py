"""``groups = "auto"`` in a launch, as people see it."""

from __future__ import annotations

from pathlib import Path

from zmqtrain.cli.tune_tables import Shown
from zmqtrain.experiment import launch
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.topology.schema import Topology


def launch_tuned(
    file: Path,
    topology: Topology,
    emulation: Emulation | None,
    *,
    json_lines: bool,
    data: str | None,
    resume: str | None,
    run_dir: Path | None,
) -> int:
    """Tune and train, and print what happens. Returns the exit code. Raises what `zmqtrain.experiment.launch.launch_tuned` does."""
    shown = Shown(json_lines=json_lines)
    return launch.launch_tuned(file, topology, emulation, shown, json_lines=json_lines, data=data, resume=resume, run_dir=run_dir)
