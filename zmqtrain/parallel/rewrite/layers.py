"""What each layer of a model is replaced by, as its plan says; and why one is left whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from zmqtrain.errors import UsageError
from zmqtrain.events import Recorder
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.domain.make import HALO, domain_layer
from zmqtrain.parallel.geometry import even
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.attention import MultiheadAttention
from zmqtrain.parallel.model.batch_norm import BatchNorm
from zmqtrain.parallel.model.convolution import Convolution
from zmqtrain.parallel.model.dropout import Batch, Masks
from zmqtrain.parallel.model.embedding import Embedding
from zmqtrain.parallel.model.linear import Linear
from zmqtrain.parallel.model.lstm import LSTM
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.transformer import TransformerEncoderLayer
from zmqtrain.parallel.placement import Divisions
from zmqtrain.parallel.plan import Choice

#: Rows of the image that domain-parallel layers are made for; each forward says how many there really are.
_ROWS = 1 << 12

Statistics = Literal["whole", "local"]


@dataclass(frozen=True, slots=True)
class Assigned:
    """How one layer is computed."""

    choice: Choice
    grid: Grid

    @property
    def apart(self) -> bool:
        """Whether all processes have different samples, or different strips of them."""
        return self.choice in ("batch", "domain")

    @property
    def samples(self) -> Literal["columns", "all"]:
        return "all" if self.choice == "batch" else "columns"


@dataclass(slots=True)
class Maker:
    """Makes the divided layers of one model."""

    fabric: Fabric
    batch: Batch
    seed: int = 0
    statistics: Statistics = "whole"
    strict: bool = False
    recorder: Recorder | None = None
    left_whole: dict[str, str] = field(default_factory=dict)
    """Layers that could not be divided as planned, and why."""

    def make(self, module: nn.Module, name: str, assigned: Assigned, divisions: Divisions | None) -> tuple[nn.Module, Assigned]:
        """What stands for ``module``, and how it is computed. ``divisions``: of its input's channels, as the layer before has left
        them. Raises `UsageError` for a layer that cannot be divided, if ``strict``."""
        try:
            return self._made(module, name, assigned, divisions), assigned
        except UsageError as error:
            if self.strict:
                raise
            self.left_whole[name] = str(error)
        whole = Assigned("whole", assigned.grid)
        return self._made(module, name, whole, None), whole

    def _made(self, module: nn.Module, name: str, assigned: Assigned, divisions: Divisions | None) -> nn.Module:
        site = Site(name, assigned.grid, self.fabric)
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and assigned.choice != "domain":
            kept = divisions if assigned.choice == "model" else None
            return BatchNorm(module, site, divisions=kept, statistics=self.statistics, samples=assigned.samples)
        if assigned.choice == "domain":
            return self._domain(module, name, site)
        if assigned.choice == "model":
            return self._model(module, name, site)
        return module

    def _domain(self, module: nn.Module, name: str, site: Site) -> nn.Module:
        if not has_parameters(module) and type(module) not in HALO:
            return module
        if type(module) not in HALO and not isinstance(module, nn.BatchNorm2d):
            raise UsageError(f"layer {name}: {type(module).__name__} cannot be divided along the image; it is left whole")
        everybody = self.fabric.among(tuple(range(self.fabric.size)))
        statistics = everybody if self.statistics == "whole" else None
        division = even(_ROWS, site.rows)
        return domain_layer(module, name, site.column_group, division, statistics=statistics, recorder=self.recorder)[0]

    def _model(self, module: nn.Module, name: str, site: Site) -> nn.Module:
        if isinstance(module, nn.TransformerEncoder):
            for number, layer in enumerate(module.layers):
                inner = site.child(f"layers.{number}")
                assert isinstance(layer, nn.TransformerEncoderLayer)
                module.layers[number] = TransformerEncoderLayer(layer, inner, batch=self.batch, seed=self.seed)
            return module
        if isinstance(module, nn.TransformerEncoderLayer):
            return TransformerEncoderLayer(module, site, batch=self.batch, seed=self.seed)
        if isinstance(module, nn.MultiheadAttention):
            return MultiheadAttention(module, site, masks=Masks(site, self.batch, self.seed))
        if isinstance(module, nn.LSTM):
            return LSTM(module, site, masks=Masks(site, self.batch, self.seed))
        if type(module) is nn.Linear:
            return Linear(module, site, gather=False)
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return Convolution(module, site, gather=False)
        if type(module) is nn.Embedding:
            return Embedding(module, site)
        if has_parameters(module) and not isinstance(module, nn.LayerNorm | nn.GroupNorm):
            raise UsageError(f"layer {name}: {type(module).__name__} cannot be divided over the rows; it is left whole")
        return module


def has_parameters(module: nn.Module) -> bool:
    """Whether a module or one within it has parameters."""
    return any(True for _ in module.parameters())


def tied(model: nn.Module) -> Iterator[str]:
    """The names of modules that share a parameter with another one."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        if len(names) > 1:
            yield from names
