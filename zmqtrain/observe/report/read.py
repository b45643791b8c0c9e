"""Reads a run directory for its report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.observe.report.figures import Json, figures_of
from zmqtrain.words import counted

#: The fields of ``summary.json`` that the page shows.
HEADLINE = (
    "status", "world", "steps", "samples", "seconds", "training_seconds", "samples_per_s", "step_s", "exposed_communication_s",
    "loss", "eval", "staleness", "bytes_sent", "replica_spread", "groups", "group_size", "roles", "hosts", "versions", "losses",
    "account", "resizing",
)  # fmt: skip


def read_run(path: Path) -> Json:
    """Everything that the page shows about a run, as plain values. Raises `UsageError` if there is no run."""
    events = path / "events.jsonl"
    if not events.exists():
        raise UsageError(f"{path} is not a run directory: it has no events.jsonl")
    summary = _json(path / "summary.json")
    broken: list[int] = []
    figures = figures_of(_events(events, broken), group_size=int(summary.get("group_size") or 1))
    notes = (
        [f"{counted(len(broken), 'line')} of events.jsonl left out: not readable (the first: line {broken[0]})"] if broken else []
    )
    if not summary:
        notes.append("the run has not ended: the page shows its state so far")
    return {
        "name": path.name,
        "summary": {key: summary[key] for key in HEADLINE if key in summary},
        "error": {
            key: value
            for key, value in _json(path / "error.json").items()
            if key in ("peer", "type", "message", "verdict", "shown")
        },
        "notes": notes,
        "trace": (path / "trace.json").exists(),
        **figures,
    }


def _events(path: Path, broken: list[int]) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                event = json.loads(line)
            except ValueError:
                broken.append(number)
                continue
            if isinstance(event, dict):
                yield event
            else:
                broken.append(number)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
