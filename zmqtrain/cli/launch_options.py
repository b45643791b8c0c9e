"""What a person asks of ``zmqtrain launch`` beside the topology file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zmqtrain.launcher.engine import Engine


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options of the command line, as `zmqtrain.cli.launch.run_launch` takes them."""

    json_lines: bool = False
    """Print JSON lines instead of tables."""
    data: str | None = None
    """Where tasks find their data, instead of what the file says."""
    resume: str | None = None
    """The checkpoint to go on from: a folder, a run, or ``latest``."""
    run_dir: Path | None = None
    """The run directory; by default a new one in ``runs/``."""
    settings: Sequence[str] = ()
    """Changes to the file: ``SECTION.KEY=VALUE``."""
    emulate: bool = False
    """Put all hosts on this machine, with a network like the file's between them."""
    shaping: str | None = None
    """With ``emulate``: how the network is shaped."""
    dilation: float | None = None
    """With ``emulate``: how many times as slow the run is, instead of what the file says."""
    detach: bool = False
    """Return 0 as soon as all roles have joined; the launcher goes on without this process and its terminal."""
    go_on: bool = False
    """Where there is a run in ``run_dir`` already, it is the one to go on with."""
    engine: str | None = None
    """The name of what starts the agents, instead of the file's."""
    submit: bool = False
    """Let Slurm launch it, by a batch script."""
    template: Path | None = None
    """With ``submit``: the batch script's template."""
    dry_run: bool = False
    """With ``submit``: print the batch script instead."""
    own_engine: Engine | None = None
    """What starts the agents, where that is not for the file to say."""

    def all_settings(self) -> list[str]:
        """The changes to the file, those included that have options of their own."""
        dilation = [] if self.dilation is None else [f"network.dilation={self.dilation!r}"]
        engine = [] if self.engine is None else [f"engine.kind={self.engine}"]
        return [*self.settings, *dilation, *engine]
