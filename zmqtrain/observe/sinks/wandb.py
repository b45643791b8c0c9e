"""Weights & Biases: one of its runs for each run of ours. Its own environment variables (``WANDB_MODE``, ...) hold."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from zmqtrain.errors import UsageError
from zmqtrain.observe.sinks.base import Figures, QuietSink, RunFacts

_OPTIONS: dict[str, type | tuple[type, ...]] = {
    "project": str, "entity": str, "group": str, "name": str, "tags": list, "notes": str, "mode": str,
}  # fmt: skip
_MODES = ("online", "offline", "disabled", "shared")


class WandbSink(QuietSink):
    """Logs the figures of each step, with the resolved topology as the run's config."""

    def __init__(self) -> None:
        self._run: Any = None

    def begin(self, run: RunFacts) -> None:
        options = run.checked_options("wandb", _OPTIONS)
        mode = options["mode"] = options.get("mode") or os.environ.get("WANDB_MODE") or "online"
        if mode not in _MODES:
            raise UsageError(f"[observe] to: wandb has no mode {mode!r}; choose from {', '.join(_MODES)}")
        if mode not in ("offline", "disabled") and not wandb.login(prompt=False):
            raise UsageError(
                "[observe] to: wandb has no API key: run `wandb login`, set WANDB_API_KEY, or keep the figures on this machine "
                "with WANDB_MODE=offline"
            )
        options.setdefault("project", run.name)
        options.setdefault("name", run.directory.name)
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        config = {**run.config, "world": run.world, "directory": str(run.directory)}
        self._run = wandb.init(dir=str(run.directory), config=config, settings=settings, **options)
        # Steps are a figure like others: evaluations come between steps, and a resumed run goes back.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def figures(self, rows: Sequence[Figures]) -> None:
        for row in rows:
            self._run.log({"step": row.step, **row.values})

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(summary.get("exit_code") or 0))
