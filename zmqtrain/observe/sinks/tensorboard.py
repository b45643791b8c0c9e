"""TensorBoard: event files in the run directory. ``tensorboard --logdir runs`` shows all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.summary import Writer

from zmqtrain.observe.sinks.base import Figures, QuietSink, RunFacts

#: The folder in the run directory.
FOLDER = "tensorboard"


class TensorboardSink(QuietSink):
    """Writes scalars with TensorBoard's own writer, which needs neither TensorFlow nor torch."""

    def __init__(self) -> None:
        self._writer: Any = None

    def begin(self, run: RunFacts) -> None:
        options = run.checked_options("tensorboard", {"folder": str})
        folder = Path(options["folder"]) / run.directory.name if "folder" in options else run.directory / FOLDER
        self._writer = Writer(str(folder))

    def figures(self, rows: Sequence[Figures]) -> None:
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step, wall_time=row.time_s)
        self._writer.flush()

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        self._writer.close()
