"""Prometheus: the run's state on a port of its own, for as long as the run lasts. docs/grafana.json is a board for it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from zmqtrain.errors import UsageError
from zmqtrain.observe.sinks.base import QuietSink, RunFacts
from zmqtrain.observe.summary import metrics_of
from zmqtrain.observe.sums import mean_staleness

#: Where it listens by default: nobody else can read it, and the port is in no common program's list.
ADDRESS, PORT = "127.0.0.1", 9477
#: Bounds of the step time's histogram, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class PrometheusSink(QuietSink):
    """Serves ``/metrics``. Every series has the label ``run``; those of workers have ``worker`` and ``host``, too."""

    def __init__(self) -> None:
        self._server: Any = None
        self.port = 0
        """The port on which it listens, once it has begun."""

    def begin(self, run: RunFacts) -> None:
        options = run.checked_options("prometheus", {"port": int, "address": str})
        address, port = options.get("address", ADDRESS), options.get("port", PORT)
        if not 0 <= port < 65536:
            raise UsageError(f"[observe.options] prometheus: port = {port} is not a TCP port; 0 chooses a free one")
        registry = CollectorRegistry()
        self._metrics = _Metrics(registry, run.directory.name)
        self._metrics.info.labels(run.directory.name, run.name, run.world, version("zmqtrain")).set(1)
        try:
            self._server, _ = start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            raise UsageError(
                f"[observe] to: Prometheus cannot be served on {address} port {port}: {error.strerror or error}. Set "
                "[observe.options] prometheus = { port = ... }; 0 chooses a free one"
            ) from error
        self.port = self._server.server_port

    def events(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            self._metrics.take(event)

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Metrics:
    """The series, in base units, named as Prometheus asks: ``zmqtrain_`` first, the unit last, ``_total`` for counters."""

    def __init__(self, registry: CollectorRegistry, run: str) -> None:
        self._run = run
        worker, plain = ("run", "worker", "host"), ("run",)
        self.info = Gauge("zmqtrain_run_info", "The run; always 1.", ("run", "name", "world", "version"), registry=registry)
        self._steps = Counter("zmqtrain_worker_steps_total", "Steps that the worker has done.", worker, registry=registry)
        self._samples = Counter("zmqtrain_worker_samples_total", "Samples that it has trained on.", worker, registry=registry)
        self._seconds = Histogram(
            "zmqtrain_worker_step_seconds", "Duration of its steps.", worker, buckets=BUCKETS, registry=registry
        )
        self._compute = Counter("zmqtrain_worker_compute_seconds_total", "Time that it computed.", worker, registry=registry)
        self._exposed = Counter(
            "zmqtrain_worker_exposed_seconds_total", "Time that its steps waited for the network.", worker, registry=registry
        )
        self._data = Counter("zmqtrain_worker_data_seconds_total", "Time that it waited for data.", worker, registry=registry)
        self._loss = Gauge("zmqtrain_worker_loss", "Loss of its newest step.", worker, registry=registry)
        self._rate = Gauge("zmqtrain_worker_learning_rate", "Learning rate of its newest step.", worker, registry=registry)
        self._stale = Gauge(
            "zmqtrain_worker_staleness_updates", "Staleness of its newest step's reads, in updates.", worker, registry=registry
        )
        self._step = Gauge("zmqtrain_worker_step", "Number of its newest step.", worker, registry=registry)
        self._last = Gauge("zmqtrain_worker_last_step_timestamp_seconds", "When its newest step ended.", worker, registry=registry)
        self._eval = Gauge("zmqtrain_evaluation", "Result of the newest evaluation.", ("run", "metric"), registry=registry)
        self._members = Gauge("zmqtrain_members", "Members of the run.", ("run", "role"), registry=registry)
        self._lost = Counter("zmqtrain_members_lost_total", "Members that were lost.", ("run", "role"), registry=registry)
        self._checkpoints = Counter("zmqtrain_checkpoints_total", "Checkpoints.", ("run", "result"), registry=registry)
        self._kept = Gauge("zmqtrain_newest_checkpoint_step", "Step of the newest complete checkpoint.", plain, registry=registry)
        self._warnings = Counter("zmqtrain_warnings_total", "Warnings of workers.", plain, registry=registry)
        self._there: set[tuple[str, Any, str]] = set()

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event of the run."""
        kind, role, values = event["kind"], event["role"], event["values"]
        if kind == "step" and event["rank"] is not None:
            self._take_step(event, values)
        elif kind == "eval":
            for name, value in metrics_of(values).items():
                self._eval.labels(self._run, name.removeprefix("eval_")).set(value)
        elif kind in ("join", "leave", "lost"):
            member = (role, event["rank"], str(values.get("peer")))
            (self._there.add if kind == "join" else self._there.discard)(member)
            self._members.labels(self._run, role).set(sum(each[0] == role for each in self._there))
            lost = self._lost.labels(self._run, role)  # there from the first member on: a rate needs the 0 before the first loss
            if kind == "lost":
                lost.inc()
                with contextlib.suppress(KeyError):  # it has done no step
                    self._last.remove(self._run, f"{role}/{event['rank']}", event["host"])
        elif kind in ("checkpoint complete", "checkpoint failed", "checkpoint late"):
            self._checkpoints.labels(self._run, kind.removeprefix("checkpoint ")).inc()
            if kind == "checkpoint complete":
                self._kept.labels(self._run).set(event["step"])
        elif kind == "warning":
            self._warnings.labels(self._run).inc()

    def _take_step(self, event: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        of = (self._run, f"{event['role']}/{event['rank']}", event["host"])
        self._steps.labels(*of).inc()
        self._step.labels(*of).set(event["step"])
        self._last.labels(*of).set(event["time"])
        self._seconds.labels(*of).observe(values.get("seconds") or 0.0)
        for counter, name in (
            (self._samples, "samples"), (self._compute, "compute_s"), (self._exposed, "exposed_s"), (self._data, "data_s"),
        ):  # fmt: skip
            counter.labels(*of).inc(max(0.0, values.get(name) or 0.0))
        for gauge, value in (
            (self._loss, values.get("loss")), (self._rate, values.get("lr")), (self._stale, mean_staleness(values)),
        ):  # fmt: skip
            if isinstance(value, int | float):
                gauge.labels(*of).set(value)
