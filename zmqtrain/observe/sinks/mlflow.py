"""MLflow: one of its runs for each run of ours. Its own environment variables (``MLFLOW_TRACKING_URI``, ...) hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from zmqtrain.observe.sinks.base import Figures, QuietSink, RunFacts

#: What a tracking server takes at once.
MOST_METRICS, MOST_PARAMETERS = 1000, 100
#: The longest value of a parameter that every version takes.
MOST_TEXT = 500
_STATUS = {"done": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}


class MlflowSink(QuietSink):
    """Logs the figures of each step as metrics, and the resolved topology as parameters."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""

    def begin(self, run: RunFacts) -> None:
        options = run.checked_options("mlflow", {"tracking_uri": str, "experiment": str})
        self._client = MlflowClient(tracking_uri=options.get("tracking_uri"))
        experiment = options.get("experiment", run.name)
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._run = self._client.create_run(number, run_name=run.directory.name).info.run_id
        parameters = [Param(key, value[:MOST_TEXT]) for key, value in _flat(run.config)]
        tags = [RunTag("zmqtrain.directory", str(run.directory)), RunTag("zmqtrain.world", run.world)]
        self._client.log_batch(self._run, tags=tags)
        for start in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + MOST_PARAMETERS])

    def figures(self, rows: Sequence[Figures]) -> None:
        metrics = [Metric(name, value, int(1e3 * row.time_s), row.step) for row in rows for name, value in row.values.items()]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + MOST_METRICS])

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        self._client.set_terminated(self._run, status=_STATUS.get(status, "KILLED"))


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """A parameter for each value, named by its path; lists are written out."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", str(value)
