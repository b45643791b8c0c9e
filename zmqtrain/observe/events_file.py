"""Reads ``events.jsonl`` for programs: plain rows, or a table of pandas or polars. docs/events.md describes the rows."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zmqtrain.errors import UsageError
from zmqtrain.observe.run_directory import SCHEMA, VERSION, find_run, training_of
from zmqtrain.observe.sums import SUMS
from zmqtrain.words import counted

if TYPE_CHECKING:
    import pandas
    import polars

#: The fields of each row beside ``values``.
FIELDS = ("time", "host", "role", "rank", "step", "kind")
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class Events:
    """The events of a run, as far as they have been written."""

    path: Path
    version: int
    """The version of the file's rows."""
    broken: int
    """The number of lines that could not be read, such as the last one of a launcher that was killed."""
    _rows: tuple[dict[str, Any], ...]

    def __repr__(self) -> str:
        kinds = Counter(row["kind"] for row in self._rows)
        summed = sum(row["values"].get("count") or 0 for row in self.rows(SUMS))
        return (
            f"<events in {self.path}: {', '.join(f'{count:,} {kind}' for kind, count in kinds.most_common()) or 'none yet'}"
            + (f"; {summed:,} more events are only in the sums" if summed else "")
            + (f"; {counted(self.broken, 'broken line')}" if self.broken else "")
            + ">"
        )

    def rows(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The events, or those of one kind: time, host, role, rank, step, kind, and ``values``, a dictionary."""
        return [row for row in self._rows if kind is None or row["kind"] == kind]

    def table(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, each in one flat dictionary: a column for each value that any of them has, ``None`` where it is
        missing. A value with the name of a field gets the prefix ``value_``. Events that the file has only in a line of kind
        ``sums`` (docs/events.md) are not among them."""
        flat = [
            {name: row[name] for name in FIELDS}
            | {f"value_{name}" if name in FIELDS else name: value for name, value in row["values"].items()}
            for row in self.rows(kind)
        ]
        columns = dict.fromkeys(name for row in flat for name in row)
        return [{name: row.get(name) for name in columns} for row in flat]

    def pandas(self, kind: str) -> pandas.DataFrame:
        """`table` as a DataFrame of pandas, which must be installed."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise UsageError(f"Events.pandas needs pandas ({error}): pip install pandas, or use Events.table") from error
        return DataFrame(self.table(kind))

    def polars(self, kind: str) -> polars.DataFrame:
        """`table` as a DataFrame of polars, which must be installed."""
        try:
            from polars import DataFrame
        except ImportError as error:
            raise UsageError(f"Events.polars needs polars ({error}): pip install polars, or use Events.table") from error
        return DataFrame(self.table(kind), infer_schema_length=None, strict=False)


def read(run: str | Path) -> Events:
    """Read the events of a run: its directory, its name below ``runs``, or ``latest``. It may still be training.

    Raises `UsageError` if there is no such run, or if a later zmqtrain has written it in a form that this one does not know."""
    path = training_of(find_run(str(run))) / "events.jsonl"
    rows: list[dict[str, Any]] = []
    version, broken = VERSION, 0
    for row in _lines(path):
        if row is None:
            broken += 1
        elif row["kind"] == SCHEMA:
            version = row["values"].get("version")
            if not isinstance(version, int) or version > VERSION:
                raise UsageError(f"{path} has rows of version {version}, and this zmqtrain reads version {VERSION}: update it")
        else:
            rows.append(row)
    return Events(path, version, broken, tuple(rows))


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """A row for each line; ``None`` for those that are no event."""
    try:
        lines = path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    with lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                yield None
                continue
            if not isinstance(row, dict) or not isinstance(row.get("values"), dict) or "kind" not in row:
                yield None
                continue
            yield {**{name: row.get(name) for name in FIELDS}, "values": _restored(row["values"])}


def _restored(value: Any) -> Any:
    """Values as they were recorded: JSON has no NaN and no infinity."""
    if isinstance(value, str):
        return _NUMBERS.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value
