"""How long a real device takes for a model, layer by layer.

A profile is a JSON file::

    {"layers": [{"name": "conv1", "numel": 1000, "forward_s": 0.01, "backward_s": 0.02}, ...],
     "update_s": 0.001, "evaluate_s": 0.5, "samples": 50000, "batch_size": 32, "source": "measured on ..."}

in the order of the forward. Times are those of one worker's step. With ``batch_size`` they hold for that many samples and grow with
the worker's samples: as ``measured`` for other numbers of samples, or else in proportion. The fields of `Layer` and `Profile` are
all that exist. Some profiles are shipped and found by name (`shipped`); `zmqtrain profile` makes one for a task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.topology.bucket_limit import BucketLimit
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.suggest import did_you_mean
from zmqtrain.train.buckets import BucketPlan, ParameterInfo, plan_buckets
from zmqtrain.train.device.fields import check_fields
from zmqtrain.train.device.measured import Measured
from zmqtrain.wire.dtypes import DTYPES, dtype_named

SHIPPED = Path(__file__).parents[1] / "profiles"
#: An error lists this many differences between a profile and a model before it counts the rest.
MOST_DIFFERENCES = 12


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a model."""

    name: str
    numel: int
    """Number of parameters, weights and biases; 0 if the layer has none but takes time."""
    forward_s: float
    backward_s: float
    dtype: str = "float32"
    flops_forward: int = 0
    """Multiplications and additions in the forward of one sample; 0 if not known."""
    activation_numel: int = 0
    """Elements of the output for one sample; 0 if not known."""
    kind: str = ""
    """The kind of layer, as `zmqtrain.plan.layers.Kind` names it; empty if not known."""
    phase: str = ""
    """``conv`` or ``fc``; empty if not known."""
    forward_spread_s: float = 0.0
    """Half the interquartile range of the measured times."""
    backward_spread_s: float = 0.0
    peak_share: float = 0.0
    """The share of the device's peak that its matrix products reach in forward and backward; 0 if not known, or no products."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How long a real device takes for a step of a model."""

    layers: tuple[Layer, ...]
    name: str = ""
    source: str = ""
    """Where the times come from: who measured them and on what, or nominal."""
    update_s: float = 0.0
    evaluate_s: float = 0.0
    samples: int = 1 << 20
    """Number of samples of the training data."""
    batch_size: int = 0
    """The number of samples of a worker's step for which the times hold; 0: any number."""
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec("torch.optim:SGD", ({"lr": 0.0},)))
    measured: Measured | None = None
    """Further measurements, if any."""

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """The profile in a file, or the shipped one of this name (without a suffix and without a separator: ``resnet50``).

        Raises `UsageError` if there is none, or it cannot be used.
        """
        file = find(path)
        try:
            status = file.stat()
            return _read(file, status.st_mtime_ns, status.st_size)
        except (OSError, ValueError) as error:
            raise UsageError(f"[compute] profile {path} cannot be used: {_reason(error)}") from error

    @classmethod
    def of_job(cls, topology: Topology) -> Profile:
        """The profile that ``[compute] profile`` names. Raises `UsageError` if it names none, or one that cannot be used."""
        if topology.compute.profile is None:
            raise UsageError(
                '[compute] device = "modelled" needs [compute] profile: a JSON file with the times of layers, or the name of a '
                "shipped profile"
            )
        return cls.load(topology.compute.profile)

    @classmethod
    def of(cls, values: Any) -> Profile:
        """The profile in a file's JSON content. Raises `ValueError` that says what is wrong, and in which layer."""
        if not isinstance(values, dict) or not isinstance(values.get("layers"), list):
            raise ValueError("a profile must be an object with a list named layers")
        layers = tuple(_layer(number, value) for number, value in enumerate(values["layers"], start=1))
        rest = {key: value for key, value in values.items() if key != "layers"}
        if "optimizer" in rest:
            rest["optimizer"] = _optimizer(rest["optimizer"])
        if "measured" in rest:
            rest["measured"] = Measured.of(rest["measured"])
        check_fields("the profile", cls, {"layers": layers, **rest})
        names: set[str] = set()
        for layer in layers:
            if layer.name in names:
                raise ValueError(f"two layers are named {layer.name!r}; names must differ")
            names.add(layer.name)
        if not any(layer.numel for layer in layers):
            raise ValueError("no layer has parameters, so there is nothing to train" if layers else "there are no layers")
        return cls(layers, **rest)

    @property
    def numel(self) -> int:
        """The number of parameters of the model."""
        return sum(layer.numel for layer in self.layers)

    @property
    def step_s(self) -> float:
        """Seconds of a step's forward and backward, as the profile states them."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def scaled(self, samples: float) -> float:
        """The factor on times for a step of ``samples`` samples."""
        if not self.batch_size:
            return 1.0
        if self.measured is None or not self.measured.sizes:
            return samples / self.batch_size
        of = self.measured
        return (of.conv_s(samples) + of.fc_s(samples)) / (of.conv_s(self.batch_size) + of.fc_s(self.batch_size))

    def conv_s(self, samples: float) -> float:
        """t_conv: seconds of forward and backward of ``samples`` samples in the layers before the FC phase. These are one worker's
        samples: in a group of k workers, the batch divided by k."""
        return self._phase_s("conv", samples)

    def fc_s(self, samples: float) -> float:
        """t_fc: the same for the FC phase. Raises `UsageError` if the profile does not say which layers that is."""
        return self._phase_s("fc", samples)

    def to_values(self) -> dict[str, Any]:
        """The JSON form, which `of` reads, without fields that have their default value."""
        values: dict[str, Any] = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in ("layers", "optimizer", "measured") and getattr(self, each.name) != each.default
        }
        if self.measured is not None:
            values["measured"] = self.measured.to_values()
        if len(self.optimizer.groups) == 1 and self.optimizer != Profile(()).optimizer:
            values["optimizer"] = {"name": self.optimizer.name, "groups": [dict(self.optimizer.groups[0])]}
        usual = {each.name: each.default for each in fields(Layer)}
        layers = [{key: value for key, value in asdict(layer).items() if value != usual[key]} for layer in self.layers]
        return {**values, "layers": layers}

    def known(self) -> Measured:
        """The further measurements; empty ones if there are none."""
        return self.measured or Measured()

    def bucket_plans(self, bucket_bytes: int | BucketLimit) -> tuple[BucketPlan, ...]:
        """How the parameters are divided into buckets of at most ``bucket_bytes``."""
        infos = [ParameterInfo(each.name, each.numel, dtype_named(each.dtype).itemsize, each.dtype, 0) for each in self.layers]
        return plan_buckets(infos, bucket_bytes)

    def _phase_s(self, phase: str, samples: float) -> float:
        if self.measured is not None and self.measured.sizes:
            return self.measured.conv_s(samples) if phase == "conv" else self.measured.fc_s(samples)
        if not any(layer.phase for layer in self.layers):
            raise UsageError(
                f"profile {self.name or 'of the job'} does not say which layers are the FC phase: add `phase` to its layers, or "
                "make a new profile with `zmqtrain profile`"
            )
        seconds = sum(layer.forward_s + layer.backward_s for layer in self.layers if layer.phase == phase)
        return seconds * (samples / self.batch_size if self.batch_size else 1.0)

    def check_model(self, layers: Mapping[str, int]) -> None:
        """Raise `UsageError` unless these are the profile's layers with parameters. ``layers``: the model's layers by name, each
        with its number of elements."""
        ours = {layer.name: layer.numel for layer in self.layers if layer.numel}
        theirs = {name: numel for name, numel in layers.items() if numel}
        differences = [f"{name} ({numel} parameters) is not in the model" for name, numel in ours.items() if name not in theirs]
        differences += [
            f"the model's {name} ({numel} parameters) is not in the profile" for name, numel in theirs.items() if name not in ours
        ]
        differences += [
            f"{name} has {theirs[name]} parameters in the model and {numel} in the profile"
            for name, numel in ours.items()
            if theirs.get(name, numel) != numel
        ]
        if differences:
            shown = [f"\n  {difference}" for difference in differences[:MOST_DIFFERENCES]]
            if len(differences) > MOST_DIFFERENCES:
                shown.append(f"\n  and {len(differences) - MOST_DIFFERENCES} more")
            raise UsageError(
                f"[compute] profile {self.name or 'of the job'} describes another model than the task's "
                f"({len(ours)} layers with {self.numel} parameters; the model has {len(theirs)} with {sum(theirs.values())}):"
                + "".join(shown)
            )


def shipped() -> tuple[str, ...]:
    """The names of the profiles that come with the package."""
    return tuple(sorted(file.stem for file in SHIPPED.glob("*.json")))


def find(path: str | Path) -> Path:
    """The file that `Profile.load` reads. Raises `UsageError` for the name of a profile that is not shipped."""
    file = Path(path)
    if isinstance(path, Path) or file.suffix or file.name != path:
        return file
    if path in shipped():
        return SHIPPED / f"{path}.json"
    meant = did_you_mean(path, shipped())
    raise UsageError(
        f"[compute] profile {path} cannot be used: no profile of this name is shipped; available: {', '.join(shipped())}"
        + (f". Did you mean {meant!r}?" if meant else ". The name of a file needs a suffix, as in profile.json")
    )


@lru_cache(maxsize=16)
def _read(file: Path, mtime_ns: int, size: int) -> Profile:
    """Cached, since thousands of simulated workers read the same file; modification time and size identify its version."""
    return Profile.of(json.loads(file.read_text(encoding="utf-8")))


def _layer(number: int, values: Any) -> Layer:
    if not isinstance(values, dict):
        raise ValueError(f"layer {number} is {values!r:.60}; it must be an object")
    name = values.get("name")
    if not isinstance(name, str):
        raise ValueError(f"layer {number} has no name" if name is None else f"layer {number} has the name {name!r:.60}")
    check_fields(f"layer {name!r}", Layer, values)
    if values.get("dtype", "float32") not in DTYPES:
        raise ValueError(f"layer {name!r}: unknown element type {values['dtype']!r:.60}; choose one of {', '.join(DTYPES)}")
    return Layer(**values)


def _optimizer(values: Any) -> OptimizerSpec:
    match values:
        case {"name": str(name), "groups": [dict(group)]}:
            return OptimizerSpec(name, (group,))
    raise ValueError('optimizer must be like {"name": "torch.optim:SGD", "groups": [{"lr": 0.1}]}')


def _reason(error: Exception) -> str:
    return f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
