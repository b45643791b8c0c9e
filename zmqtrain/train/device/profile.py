"""How long a real device takes for a model, layer by layer.

A profile is a JSON file::

    {"layers": [{"name": "conv1", "numel": 1000, "forward_s": 0.01, "backward_s": 0.02}, ...],
     "update_s": 0.001, "evaluate_s": 0.5, "samples": 50000, "batch_size": 32, "source": "measured on ..."}

in the order of the forward. Times are those of one worker's step; with ``batch_size`` they are of so many samples and grow with the
worker's: with ``measured`` as other numbers of samples were measured, else in proportion. The fields of `Layer` and `Profile` are
all that there are. Some profiles are shipped, and found by name (`shipped`); `zmqtrain profile` makes one of a task.
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
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.suggest import did_you_mean
from zmqtrain.train.buckets import BucketPlan, ParameterInfo, plan_buckets
from zmqtrain.train.device.fields import check_fields
from zmqtrain.train.device.measured import Measured
from zmqtrain.wire.dtypes import DTYPES, dtype_named

SHIPPED = Path(__file__).parents[1] / "profiles"
#: Differences between a profile and a model that an error lists before it says how many more there are.
MOST_DIFFERENCES = 12


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a model."""

    name: str
    numel: int
    """Parameters, weights and biases; 0: none, but it takes its time."""
    forward_s: float
    backward_s: float
    dtype: str = "float32"
    flops_forward: int = 0
    """Multiplications and additions of the forward, of one sample; 0: not known."""
    activation_numel: int = 0
    """Elements of its output, of one sample; 0: not known."""
    kind: str = ""
    """What it is, as `zmqtrain.plan.layers.Kind` has it; empty: not known."""
    phase: str = ""
    """``conv`` or ``fc``; empty: not known."""
    forward_spread_s: float = 0.0
    """Half the distance between the quartiles of what was measured."""
    backward_spread_s: float = 0.0
    peak_share: float = 0.0
    """Of the device's peak in products of matrices, reached in forward and backward; 0: not known, or no products."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How long a real device takes for a step of a model."""

    layers: tuple[Layer, ...]
    name: str = ""
    source: str = ""
    """Where the times come from: measured, by whom and on what, or nominal."""
    update_s: float = 0.0
    evaluate_s: float = 0.0
    samples: int = 1 << 20
    """Samples of the training data."""
    batch_size: int = 0
    """A worker's samples for which the times hold; 0: for any number."""
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec("torch.optim:SGD", ({"lr": 0.0},)))
    measured: Measured | None = None
    """What else was measured."""

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """The profile in a file, or the shipped one of this name (without a suffix and without a separator: ``resnet50``).

        Raises `UsageError` where there is none, or it cannot be used.
        """
        file = find(path)
        try:
            status = file.stat()
            return _read(file, status.st_mtime_ns, status.st_size)
        except (OSError, ValueError) as error:
            raise UsageError(f"[compute] profile {path} cannot be used: {_reason(error)}") from error

    @classmethod
    def of_job(cls, topology: Topology) -> Profile:
        """What ``[compute] profile`` names. Raises `UsageError` where it names none that can be used."""
        if topology.compute.profile is None:
            raise UsageError('[compute] device = "modelled" needs profile: a JSON file with layer times, or a shipped one\'s name')
        return cls.load(topology.compute.profile)

    @classmethod
    def of(cls, values: Any) -> Profile:
        """The profile in the content of a file. Raises `ValueError` that says what is wrong with which layer."""
        if not isinstance(values, dict) or not isinstance(values.get("layers"), list):
            raise ValueError("a profile is an object with a list `layers`")
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
                raise ValueError(f"there are two layers {layer.name!r}; names must differ")
            names.add(layer.name)
        if not any(layer.numel for layer in layers):
            raise ValueError("no layer has parameters, so there is nothing to train" if layers else "there are no layers")
        return cls(layers, **rest)

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return sum(layer.numel for layer in self.layers)

    @property
    def step_s(self) -> float:
        """Forward and backward of a step, as the profile says it."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def scaled(self, samples: float) -> float:
        """By what times are multiplied for a step of so many samples."""
        if not self.batch_size:
            return 1.0
        if self.measured is None or not self.measured.sizes:
            return samples / self.batch_size
        of = self.measured
        return (of.conv_s(samples) + of.fc_s(samples)) / (of.conv_s(self.batch_size) + of.fc_s(self.batch_size))

    def conv_s(self, samples: float) -> float:
        """t_conv: forward and backward of so many samples in the layers before the FC phase (of a worker; of k workers a group,
        so many are its batch divided by k)."""
        return self._phase_s("conv", samples)

    def fc_s(self, samples: float) -> float:
        """t_fc: the same in the FC phase. Raises `UsageError` where the profile does not say which layers that is."""
        return self._phase_s("fc", samples)

    def to_values(self) -> dict[str, Any]:
        """What `of` takes, without what is as it is by default."""
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
        """What else was measured, or nothing."""
        return self.measured or Measured()

    def bucket_plans(self, bucket_bytes: int) -> tuple[BucketPlan, ...]:
        """How the parameters are divided into buckets."""
        infos = [ParameterInfo(each.name, each.numel, dtype_named(each.dtype).itemsize, each.dtype, 0) for each in self.layers]
        return plan_buckets(infos, bucket_bytes)

    def _phase_s(self, phase: str, samples: float) -> float:
        if self.measured is not None and self.measured.sizes:
            return self.measured.conv_s(samples) if phase == "conv" else self.measured.fc_s(samples)
        if not any(layer.phase for layer in self.layers):
            raise UsageError(
                f"profile {self.name or 'of the job'} does not say which layers are the FC phase: give its layers `phase`, or make "
                "it anew with `zmqtrain profile`"
            )
        seconds = sum(layer.forward_s + layer.backward_s for layer in self.layers if layer.phase == phase)
        return seconds * (samples / self.batch_size if self.batch_size else 1.0)

    def check_model(self, layers: Mapping[str, int]) -> None:
        """Raise `UsageError` where these are not the profile's layers that have parameters. ``layers``: names and sizes of the
        model's, in elements."""
        ours = {layer.name: layer.numel for layer in self.layers if layer.numel}
        theirs = {name: numel for name, numel in layers.items() if numel}
        differences = [f"{name} ({numel}) is not in the model" for name, numel in ours.items() if name not in theirs]
        differences += [f"the model's {name} ({numel}) is not in the profile" for name, numel in theirs.items() if name not in ours]
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
                f"[compute] profile {self.name or 'of the job'} is of another model than the task's "
                f"({len(ours)} layers with {self.numel} parameters; the model has {len(theirs)} with {sum(theirs.values())}):"
                + "".join(shown)
            )


def shipped() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    return tuple(sorted(file.stem for file in SHIPPED.glob("*.json")))


def find(path: str | Path) -> Path:
    """The file that `Profile.load` reads. Raises `UsageError` for a name of which no profile is shipped."""
    file = Path(path)
    if isinstance(path, Path) or file.suffix or file.name != path:
        return file
    if path in shipped():
        return SHIPPED / f"{path}.json"
    meant = did_you_mean(path, shipped())
    raise UsageError(
        f"[compute] profile {path} cannot be used: no profile of this name is shipped; there are {', '.join(shipped())}"
        + (f". Did you mean {meant!r}?" if meant else ". A file's name has a suffix, like profile.json")
    )


@lru_cache(maxsize=16)
def _read(file: Path, mtime_ns: int, size: int) -> Profile:
    """Thousands of simulated workers read the same file; when it was changed and its size tell versions of it apart."""
    return Profile.of(json.loads(file.read_text(encoding="utf-8")))


def _layer(number: int, values: Any) -> Layer:
    if not isinstance(values, dict):
        raise ValueError(f"layer {number} is {values!r:.60}, where an object belongs")
    name = values.get("name")
    if not isinstance(name, str):
        raise ValueError(f"layer {number} has no name" if name is None else f"layer {number} has the name {name!r:.60}")
    check_fields(f"layer {name!r}", Layer, values)
    if values.get("dtype", "float32") not in DTYPES:
        raise ValueError(f"layer {name!r}: there is no element type {values['dtype']!r:.60}; there are {', '.join(DTYPES)}")
    return Layer(**values)


def _optimizer(values: Any) -> OptimizerSpec:
    match values:
        case {"name": str(name), "groups": [dict(group)]}:
            return OptimizerSpec(name, (group,))
    raise ValueError('optimizer must be like {"name": "torch.optim:SGD", "groups": [{"lr": 0.1}]}')


def _reason(error: Exception) -> str:
    return f"no JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
