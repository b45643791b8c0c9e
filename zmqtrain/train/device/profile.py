"""How long a real device takes for a model, layer by layer.

A profile is a JSON file::

    {"layers": [{"name": "conv1", "numel": 1000, "forward_s": 0.01, "backward_s": 0.02}, ...],
     "update_s": 0.001, "evaluate_s": 0.5, "samples": 50000, "batch_size": 32, "source": "measured on ..."}

in the order of the forward. Times are those of one worker's step; with ``batch_size`` they are of so many samples and grow with the
worker's. The fields of `Layer` and `Profile` are all that there are. Some profiles are shipped, and found by name: `shipped`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.topology.suggest import did_you_mean
from zmqtrain.train.buckets import BucketPlan, ParameterInfo, plan_buckets
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
    def of(cls, values: Any) -> Profile:
        """The profile in the content of a file. Raises `ValueError` that says what is wrong with which layer."""
        if not isinstance(values, dict) or not isinstance(values.get("layers"), list):
            raise ValueError("a profile is an object with a list `layers`")
        layers = tuple(_layer(number, value) for number, value in enumerate(values["layers"], start=1))
        rest = {key: value for key, value in values.items() if key != "layers"}
        if "optimizer" in rest:
            rest["optimizer"] = _optimizer(rest["optimizer"])
        _check_fields("the profile", cls, {"layers": layers, **rest})
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

    def scaled(self, samples: int) -> float:
        """By what times are multiplied for a step of so many samples."""
        return samples / self.batch_size if self.batch_size else 1.0

    def bucket_plans(self, bucket_bytes: int) -> tuple[BucketPlan, ...]:
        """How the parameters are divided into buckets."""
        infos = [ParameterInfo(each.name, each.numel, dtype_named(each.dtype).itemsize, each.dtype, 0) for each in self.layers]
        return plan_buckets(infos, bucket_bytes)

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
    if not isinstance(name, str) or not name:
        raise ValueError(f"layer {number} has no name" if name is None else f"layer {number} has the name {name!r:.60}")
    _check_fields(f"layer {name!r}", Layer, values)
    if values.get("dtype", "float32") not in DTYPES:
        raise ValueError(f"layer {name!r}: there is no element type {values['dtype']!r:.60}; there are {', '.join(DTYPES)}")
    return Layer(**values)


def _optimizer(values: Any) -> OptimizerSpec:
    match values:
        case {"name": str(name), "groups": [dict(group)]}:
            return OptimizerSpec(name, (group,))
    raise ValueError('optimizer must be like {"name": "torch.optim:SGD", "groups": [{"lr": 0.1}]}')


def _check_fields(what: str, cls: type[Any], values: Mapping[str, Any]) -> None:
    """No field unknown or missing, and all numbers such as a device and a model can have."""
    known = {each.name: each for each in fields(cls)}
    for key, value in values.items():
        if key not in known:
            meant = did_you_mean(key, known)
            hint = f"; did you mean {meant!r}?" if meant else f"; there are {', '.join(known)}"
            raise ValueError(f"{what} has an unknown field {key!r}{hint}")
        kind = known[key].type
        if kind == "float" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{what}: {key} is {value!r:.60}, where seconds belong")
        if kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{what}: {key} is {value!r:.60}, where a whole number belongs")
        if kind == "str" and not isinstance(value, str):
            raise ValueError(f"{what}: {key} is {value!r:.60}, where a text belongs")
        if kind in ("float", "int") and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{what}: {key} is {value}; it must be 0 or more, and finite")
    for name, each in known.items():
        if name not in values and each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{what} has no {name}")


def _reason(error: Exception) -> str:
    return f"no JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
