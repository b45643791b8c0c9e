"""Which parameter of a model lies where: a plan, applied to the modules of a model. Its forward is not looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from torch import Tensor, nn

from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.domain.make import HALO
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.attention import MultiheadAttention
from zmqtrain.parallel.model.convolution import Convolution
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.dropout import Batch, Masks
from zmqtrain.parallel.model.embedding import Embedding
from zmqtrain.parallel.model.linear import Linear
from zmqtrain.parallel.model.lstm import LSTM
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.modelled import without_content
from zmqtrain.parallel.paired import Paired
from zmqtrain.parallel.placed.pairs import pairs, sizes, transposed
from zmqtrain.parallel.placed.parameters import hooked
from zmqtrain.parallel.placement import Divisions
from zmqtrain.parallel.plan import Choice, LayerPlan, Plan, Strips
from zmqtrain.parallel.shard import Shard, one_range
from zmqtrain.topology.main_grid import divides

#: Norms with weights of each channel, which lie as channels do.
ChannelNorm = (
    nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d | nn.GroupNorm
)
#: Layers whose weights are whole wherever their inputs are: it is nothing to tell people.
_ANYWHERE = (nn.LayerNorm, nn.PReLU, nn.RMSNorm, *get_args(ChannelNorm))


@dataclass(frozen=True, slots=True)
class Assigned:
    """How one layer is computed."""

    choice: Choice
    grid: Grid
    strips: Strips | None = None
    """How images are divided, if the choice is ``domain``."""

    @classmethod
    def of(cls, plan: LayerPlan) -> Assigned:
        """The assignment of a layer that a plan divides."""
        return cls(plan.choice, plan.grid, plan.parts if plan.choice == "domain" else None)

    @property
    def apart(self) -> bool:
        """Whether all processes have different samples, or different strips of them."""
        return self.choice in ("batch", "domain")


@dataclass(frozen=True, slots=True)
class Held:
    """How a parameter or buffer is held, and by what its layer is computed."""

    shard: Shard
    assigned: Assigned


@dataclass(slots=True)
class Assignment:
    """How a model is held."""

    held: dict[str, Held] = field(default_factory=dict)
    """Of each parameter and buffer, by each of its names."""
    left_whole: dict[str, str] = field(default_factory=dict)
    """Layers that could not be divided as planned, and why."""


def main_grid(plan: Plan | None, grid: Grid) -> Grid:
    """The grid whose columns say which samples a process is given: the first one by whose rows a layer is computed."""
    return next((each.grid for each in plan or () if divides(each.choice, each.grid.rows)), grid)


def batch_grid(plan: Plan | None, grid: Grid) -> Grid:
    """The grid whose columns' samples batch parallelism divides further, over their rows: the main grid, or, where all of its
    processes are given all samples, the first whose columns have some of them. So fewer samples need to move."""
    main = main_grid(plan, grid)
    if main.columns > 1:
        return main
    found = (each.grid for each in plan or () if divides(each.choice, each.grid.rows) and each.grid.columns > 1)
    return next(found, main)


def assign(model: nn.Module, grid: Grid, plan: Plan | None, fabric: Fabric, *, whole: Iterable[str], strict: bool) -> Assignment:
    """Where everything lies.

    Raises `UsageError` for a plan of another model, and, if ``strict``, for a layer that cannot be divided.
    """
    return _Assigning(model, grid, plan, fabric, frozenset(whole), strict).run()


class _Assigning:
    def __init__(
        self, model: nn.Module, grid: Grid, plan: Plan | None, fabric: Fabric, whole: frozenset[str], strict: bool
    ) -> None:
        names = {name for name, _ in model.named_modules(remove_duplicate=False)}
        for what, given in (("the plan is of another model", [each.layer for each in plan or ()]), ("[parallel] whole", whole)):
            if missing := [name for name in given if name not in names]:
                raise UsageError(f"{what}: {type(model).__name__} has no layer {missing[0]!r}")
        self._model, self._batch, self._fabric = model, batch_grid(plan, grid), fabric
        self._whole, self._strict = whole, strict
        self._planned = {each.layer: Assigned.of(each) for each in plan or ()}
        first = next(iter(plan or ()), None)
        self._last = self._normal(Assigned.of(first) if first else Assigned("model", grid))
        self._tied = set(tied(model))
        self._channels: tuple[Assigned, Divisions] | None = None  # as the last convolution or linear layer leaves them
        self._found = Assignment()
        self._fixed: dict[str, tuple[Literal["inputs"], Divisions]] = {}
        self._pairs: dict[str, Paired] = {}
        for pair in pairs(model):
            if len({self._nearest(each) for each in pair}) == 1 and not any(self._is_whole(each) for each in pair):
                self._pairs |= pair

    def run(self) -> Assignment:
        first: dict[nn.Module, tuple[str, Assigned]] = {}
        for name, module in self._model.named_modules(remove_duplicate=False):
            if module in first:
                self._again(module, name, *first[module])
                continue
            own = self._assigned(name)
            first[module] = name, own
            if isinstance(module, nn.TransformerEncoderLayer) and own.choice == "model" and not self._is_whole(name):
                self._transformer(module, name, own)
            if any(True for _ in self._tensors(module)):
                self._layer(module, name, own)
        return self._found

    def _again(self, module: nn.Module, name: str, first: str, own: Assigned) -> None:
        """A module that has another name, too: it is held as under the first one."""
        planned = self._nearest(name)
        if planned is not None and self._normal(planned) != own:
            raise UsageError(f"the plan names the layer {name}, which is {first}, too, and is divided as that one: name it {first}")
        for each, _ in self._tensors(module):
            self._found.held[f"{name}.{each}"] = self._found.held[f"{first}.{each}" if first else each]

    def _assigned(self, name: str) -> Assigned:
        """What the plan says of a module, of one that it is in, or of the first within it; else as the one before it."""
        outer, found = name, None
        while outer and found is None:
            found = self._planned.get(outer)
            outer = outer.rpartition(".")[0]
        if found is None:
            found = next((assigned for each, assigned in self._planned.items() if each.startswith(f"{name}.") and name), None)
        self._last = self._normal(found) if found is not None else self._last
        return Assigned("whole", self._last.grid) if self._is_whole(name) else self._last

    def _nearest(self, name: str) -> Assigned | None:
        """What the plan says of a module, or of one that it is in."""
        while name and name not in self._planned:
            name = name.rpartition(".")[0]
        return self._planned.get(name)

    def _normal(self, assigned: Assigned) -> Assigned:
        """Batch parallelism takes samples as `batch_grid` has them."""
        if assigned.choice == "batch" or (assigned.grid.rows == 1 and self._batch.rows > 1):
            return Assigned("whole" if assigned.choice == "whole" else "batch", self._batch)
        return assigned

    def _is_whole(self, name: str) -> bool:
        return any(name == each or name.startswith(f"{each}.") or each == "" for each in self._whole)

    def _tensors(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        yield from module.named_parameters(recurse=False, remove_duplicate=False)
        yield from module.named_buffers(recurse=False, remove_duplicate=False)

    def _layer(self, module: nn.Module, name: str, own: Assigned) -> None:
        shards: Mapping[str, Shard] = {}
        if own.choice == "model" and not self._is_whole(name):
            try:
                shards = self._shards(module, name, own)
            except UsageError as error:
                if self._strict:
                    raise
                self._found.left_whole[name] = str(error)
            if not shards and not isinstance(module, ChannelNorm):
                own = Assigned("whole", own.grid)
        # Parameters of a module of a person's own are whole, and what they meet stays divided.
        known = type(module) in HALO or isinstance(module, _ANYWHERE) or not type(module).__module__.startswith("torch.nn")
        if own.choice == "domain" and not self._is_whole(name) and _has_parameters(module) and not known:
            text = f"layer {name}: {type(module).__name__} cannot be divided along the image; it is left whole"
            if self._strict:
                raise UsageError(text)
            self._found.left_whole[name] = text
        rank = self._fabric.rank
        everyone = tuple(range(own.grid.size))
        # What a norm meets may lie in strips or by channels. In a part that the plan has whole it is the same on all rows.
        norm = isinstance(module, ChannelNorm) and not shards and (own.choice != "whole" or self._is_whole(name))
        for each, tensor in self._tensors(module):
            ranks = everyone if own.apart or norm else own.grid.row(rank)
            shard = shards.get(each) or Shard(name, tuple(tensor.shape), own.grid.column(rank), ranks)
            self._found.held[f"{name}.{each}" if name else each] = Held(shard, own)

    def _shards(self, module: nn.Module, name: str, own: Assigned) -> Mapping[str, Shard]:
        """How a layer's own parameters are divided over the rows. Raises `UsageError` where they cannot be."""
        if isinstance(module, ChannelNorm):
            return self._channel_norm(module, name, own)
        if not _has_parameters(module) or isinstance(module, _ANYWHERE):
            return {}
        parent = name.rpartition(".")[0]
        outer = self._model.get_submodule(parent) if parent else None
        if isinstance(outer, nn.MultiheadAttention):  # its output layer
            if parent in self._found.left_whole or not self._divided_already(parent):
                return {}
            made: Divided = self._made(outer, parent, own)
            assert isinstance(made, MultiheadAttention)
            return made.out_proj.shards()
        if not type(module).__module__.startswith("torch.nn") and not transposed(module):
            return {}
        if any(each == name or each.startswith(f"{name}.") for each in self._tied):
            raise UsageError("it shares parameters with another layer")
        if any(isinstance(each, Tensor) for each in vars(module).values()):
            raise UsageError(
                f"layer {name}: its weights are made of others before each forward (weight_norm, pruning); it is left whole"
            )
        if any(hooked(parameter) for parameter in module.parameters(recurse=False)):
            raise UsageError("hooks of yours wait for the gradients of its parameters, and would see parts of them")
        packed = name in self._pairs and self._pairs[name].packs > 1 and self._paired(name, own) is not None
        if transposed(module) or packed:
            return self._by_columns(module, name, own)
        made = self._made(module, name, own)
        if isinstance(made, Linear | Convolution) and not (isinstance(made, Linear) and made.input_divided):
            self._channels = own, made.divisions
        return made.shards()

    def _divided_already(self, name: str) -> bool:
        return any(held.shard.dimension is not None for each, held in self._found.held.items() if each.rpartition(".")[0] == name)

    def _made(self, module: nn.Module, name: str, own: Assigned) -> Divided:
        """The divided layer of a layer without content."""
        site, empty = Site(name, own.grid, self._fabric), without_content(module)
        masks = Masks(site, Batch(0), 0)
        if isinstance(empty, nn.MultiheadAttention):
            return MultiheadAttention(empty, site, masks=masks)
        if isinstance(empty, nn.LSTM):
            return LSTM(empty, site, masks=masks)
        if type(empty) in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
            assert isinstance(empty, nn.Linear)
            if name in self._fixed:
                return Linear(empty, site, divisions=self._fixed[name][1], input_divided=True)
            divisions = self._paired(name, own)
            if divisions is not None and self._pairs[name].by == "inputs":
                return Linear(empty, site, divisions=divisions, input_divided=True)
            return Linear(empty, site, gather=False, divisions=divisions)
        if type(empty) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
            return Convolution(empty, site, gather=False)  # type: ignore[arg-type]
        if type(empty) is nn.Embedding:
            return Embedding(empty, site)
        raise UsageError(f"layer {name}: {type(module).__name__} cannot be divided over the rows; it is left whole")

    def _paired(self, name: str, own: Assigned) -> Divisions | None:
        """How a layer of a pair is divided; ``None`` for any other."""
        return self._pairs[name].divisions(own.grid.rows) if name in self._pairs else None

    def _by_columns(self, module: nn.Module, name: str, own: Assigned) -> Mapping[str, Shard]:
        """A linear layer with a weight of (inputs, outputs), which its own forward computes, or one that makes several activations,
        of which each is divided."""
        divisions, by_inputs = self._paired(name, own), name in self._pairs and self._pairs[name].by == "inputs"
        packs = 1 if divisions is None else self._pairs[name].packs
        if divisions is None:  # also of a pair that has fewer heads than there are rows
            shape = sizes(module)
            assert shape is not None
            divisions, by_inputs = Site(name, own.grid, self._fabric).divide(shape[1], "outputs"), False
        rank, grid, pieces, found = self._fabric.rank, own.grid, one_range(divisions), {}
        outputs = int(transposed(module))
        if packs > 1:
            width = divisions[-1][1]
            pieces = tuple(tuple((start + n * width, stop + n * width) for n in range(packs)) for start, stop in divisions)
        for each, tensor in self._tensors(module):
            whole = Shard(name, tuple(tensor.shape), grid.column(rank), grid.row(rank))
            dimension = tensor.dim() - 2 if by_inputs else min(outputs, tensor.dim() - 1)  # of a bias: none by inputs
            found[each] = whole if dimension < 0 else replace(whole, dimension=dimension, pieces=pieces)
        return found

    def _transformer(self, layer: nn.TransformerEncoderLayer, name: str, own: Assigned) -> None:
        """A transformer's MLP: the first linear layer by outputs, the second by its inputs, as the first leaves them."""
        try:
            divisions = Site(name, own.grid, self._fabric).divide(layer.linear1.out_features, "hidden units")
        except UsageError:
            return
        self._fixed[f"{name}.linear2"] = ("inputs", divisions)

    def _channel_norm(self, module: ChannelNorm, name: str, own: Assigned) -> Mapping[str, Shard]:
        """As the layer before it leaves its channels, if they are as many: a guess, which costs a message where it is wrong."""
        if self._channels is None or self._channels[0] != own:
            return {}
        divisions = self._channels[1]
        if divisions[-1][1] != (module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features):
            return {}
        rank, grid = self._fabric.rank, own.grid
        shared = {
            each: Shard(name, tuple(tensor.shape), grid.column(rank), grid.row(rank)) for each, tensor in self._tensors(module)
        }
        pieces = one_range(divisions)
        return {each: replace(shard, dimension=0, pieces=pieces) if shard.shape else shard for each, shard in shared.items()}


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def tied(model: nn.Module) -> Iterator[str]:
    """The names of modules that share a parameter with another one."""
    owners: dict[int, dict[int, str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), {}).setdefault(id(module), name)
    for names in owners.values():
        if len(names) > 1:
            yield from names.values()
