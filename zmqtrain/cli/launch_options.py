"""The options of ``zmqtrain launch``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zmqtrain.launcher.engine import Engine
from zmqtrain.topology.schema import Topology


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options of the command line, as `zmqtrain.cli.launch.run_launch` takes them."""

    json_lines: bool = False
    """Print JSON lines instead of tables."""
    data: str | None = None
    """Where tasks find their data, instead of the file's setting."""
    resume: str | None = None
    """The checkpoint to continue from: a folder, a run, or ``latest``."""
    run_dir: Path | None = None
    """The run directory; by default a new one in ``runs/``."""
    settings: Sequence[str] = ()
    """Changes to the file: ``SECTION.KEY=VALUE``."""
    emulate: bool = False
    """Put all hosts on this machine, with a network like the file's between them."""
    shaping: str | None = None
    """With ``emulate``: how the network is shaped."""
    dilation: float | None = None
    """With ``emulate``: how many times more slowly the run takes place, instead of the file's setting."""
    detach: bool = False
    """Return 0 as soon as all roles have joined; the launcher continues without this process and its terminal."""
    go_on: bool = False
    """Continue the run in ``run_dir``, if there is one."""
    engine: str | None = None
    """The name of the engine, instead of the file's."""
    submit: bool = False
    """Submit a batch script to Slurm that launches the run."""
    template: Path | None = None
    """With ``submit``: the batch script's template."""
    dry_run: bool = False
    """With ``submit``: print the batch script instead of submitting it."""
    own_engine: Engine | None = None
    """The engine, if the caller provides it instead of the file."""

    topology: Topology | None = None
    """The job, if the caller has it; the file's folder is then only where relative paths begin."""
    forked: Callable[[], None] | None = None
    """Called once this process has forked what it forks itself (`zmqtrain.launcher.prepared`): it may have threads from then on.
    Not with ``groups = "auto"``, ``detach``, ``go_on`` or ``submit``."""

    def all_settings(self) -> list[str]:
        """All changes to the file, including those that have options of their own."""
        dilation = [] if self.dilation is None else [f"network.dilation={self.dilation!r}"]
        return with_engine([*self.settings, *dilation], self.engine)


def with_engine(settings: Sequence[str], engine: str | None) -> list[str]:
    """Changes to the file, and ``--engine``'s."""
    return [*settings, *([] if engine is None else [f"engine.kind={engine}"])]
