"""Finds the sinks that ``[observe] to`` names. Only what is asked for is imported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from zmqtrain.errors import UsageError, ZmqTrainError
from zmqtrain.observe.sinks.base import Sink
from zmqtrain.topology.suggest import did_you_mean

#: The entry points of other packages' sinks.
GROUP = "zmqtrain.sinks"
#: The sinks of this package: module and class, and what pip installs for it.
BUILT_IN = {
    "tensorboard": ("zmqtrain.observe.sinks.tensorboard:TensorboardSink", "'zmqtrain[tensorboard]'"),
    "prometheus": ("zmqtrain.observe.sinks.prometheus:PrometheusSink", "prometheus-client"),
    "mlflow": ("zmqtrain.observe.sinks.mlflow:MlflowSink", "'zmqtrain[mlflow]'"),
    "wandb": ("zmqtrain.observe.sinks.wandb:WandbSink", "'zmqtrain[wandb]'"),
    "csv": ("zmqtrain.observe.sinks.csv:CsvSink", ""),
}
_METHODS = ("begin", "events", "figures", "end")


def make_sinks(names: Sequence[str]) -> dict[str, Sink]:
    """The sinks, by name. Raises `UsageError` if there is no such sink, or if its library is missing."""
    return {name: _make(name) for name in names}


def _make(name: str) -> Sink:
    if name in BUILT_IN:
        target, package = BUILT_IN[name]
        module, _, kind = target.partition(":")
        try:
            sink: Sink = getattr(import_module(module), kind)()
        except ImportError as error:
            raise UsageError(f"[observe] to: {name} cannot be used here ({error}): pip install {package}") from error
        return sink
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in found:
        return _plugged_in(found[name])
    known = [*BUILT_IN, *sorted(found)]
    near = did_you_mean(name, known)
    hint = f"; did you mean {near!r}?" if near else "."
    raise UsageError(
        f"[observe] to: there is no sink {name!r}{hint} Choose from {', '.join(known)}. Other packages can add sinks by the entry "
        f"point group {GROUP}"
    )


def _plugged_in(entry: EntryPoint) -> Sink:
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    where = f"[observe] to: the sink {entry.name!r} ({entry.value}{package})"
    try:
        made = entry.load()()
    except ZmqTrainError:
        raise
    except Exception as error:
        raise UsageError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise UsageError(
            f"{where} gives {type(made).__name__}, which lacks {', '.join(missing)}: derive it from "
            "zmqtrain.observe.sinks.base.QuietSink"
        )
    assert isinstance(made, Sink)
    return made
