"""``metrics.csv`` in the run directory: a line for each figure, with the columns time, step, name and value."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import IO, Any

from zmqtrain.observe.sinks.base import Figures, QuietSink, RunFacts

#: The file's name.
NAME = "metrics.csv"
COLUMNS = ("time", "step", "name", "value")


class CsvSink(QuietSink):
    """One line for each figure and step: new figures need no new columns, and every table program can pivot it."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def begin(self, run: RunFacts) -> None:
        run.checked_options("csv", {})
        path = run.directory / NAME
        new = not path.exists() or not path.stat().st_size
        self._file = path.open("a", newline="", encoding="utf-8")
        if new:
            csv.writer(self._file).writerow(COLUMNS)
            self._file.flush()

    def figures(self, rows: Sequence[Figures]) -> None:
        assert self._file is not None
        writer = csv.writer(self._file)
        writer.writerows((f"{row.time_s:.6f}", row.step, name, repr(value)) for row in rows for name, value in row.values.items())
        self._file.flush()

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.close()
