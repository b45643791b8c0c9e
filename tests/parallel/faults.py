"""Divided computation, deliberately broken: each fault is one rule that does something else than it should.

None of them raises an error by itself. `zmqtrain.verify` must notice each (`tests/parallel/test_verify.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.parallel import sums
from zmqtrain.parallel.domain import layer
from zmqtrain.parallel.domain.batch_norm import DomainBatchNorm2d
from zmqtrain.parallel.halo import HaloExchange
from zmqtrain.parallel.model import embedding, linear, lstm
from zmqtrain.parallel.model.batch_norm import BatchNorm
from zmqtrain.parallel.model.dropout import Masks
from zmqtrain.parallel.model.linear import LinearOperation
from zmqtrain.parallel.model.product import Scattered, Summed
from zmqtrain.parallel.placed import assign, model, norms, parameters, products, reductions, swap
from zmqtrain.parallel.placed.dispatch import RULES
from zmqtrain.parallel.placed.functions import FUNCTIONS
from zmqtrain.parallel.placed.model import ParallelModel
from zmqtrain.parallel.placed.swap import Swap
from zmqtrain.parallel.placed.tensor import Placed, World
from zmqtrain.parallel.shard import Shard

aten = torch.ops.aten
Patch = pytest.MonkeyPatch
#: Name -> (the model that has the rule, and what breaks it).
FAULTS: dict[str, tuple[str, Callable[[Patch], None]]] = {}


def fault(of: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register what breaks a rule that the model ``of`` needs."""

    def register(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS[function.__name__] = (of, function)
        return function

    return register


def around(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """``change(original, *arguments)`` instead."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def rule(patch: Patch, operator: Any, change: Callable[..., Any]) -> None:
    """``change(original, world, func, args, kwargs)`` as the rule of an operator."""
    original = RULES.get(operator)
    patch.setitem(RULES, operator, lambda *given: change(original, *given))


def without_summands(found: Any) -> Any:
    """As if others had nothing to add."""
    if isinstance(found, tuple):
        return tuple(map(without_summands, found))
    if isinstance(found, Placed):
        found.placement = replace(found.placement, summands="none")
    return found


# Gradients of parameters.


@fault("mlp")
def a_contribution_forgotten(patch: Patch) -> None:
    def change(original: Any, world: World, *rest: Any) -> Tensor:
        found: Tensor = original(world, *rest)
        return found * 0 if world.rank == 1 else found

    around(patch, parameters, "contribution", change)


@fault("mlp")
def a_contribution_counted_twice(patch: Patch) -> None:
    def change(original: Any, world: World, *rest: Any) -> Tensor:
        found: Tensor = original(world, *rest)
        return found * 2 if world.rank == 0 else found

    around(patch, parameters, "contribution", change)


@fault("strips")
def strips_summed_over_the_row_alone(patch: Patch) -> None:
    patch.setattr(assign.Assigned, "apart", property(lambda self: False))


@fault("mlp")
def sums_of_gradients_thrown_away(patch: Patch) -> None:
    patch.setattr(sums._Layer, "give", lambda self, flat: None)


@fault("mlp")
def gradient_of_the_weights_of_other_inputs(patch: Patch) -> None:
    def change(original: Any, self: Any, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return original(self, gradient, x.roll(1, -1), weight)  # type: ignore[no-any-return]

    around(patch, LinearOperation, "weight_gradient", change)


@fault("mlp")
def gradient_of_the_bias_once_a_row(patch: Patch) -> None:
    around(patch, LinearOperation, "bias_gradient", lambda original, *given: original(*given) * 2)


@fault("mlp")
def gradient_of_layer_norm_of_own_samples(patch: Patch) -> None:
    rule(patch, aten.native_layer_norm_backward.default, lambda original, *given: without_summands(original(*given)))


@fault("batch")
def gradient_of_a_kernel_of_own_samples(patch: Patch) -> None:
    rule(patch, aten.convolution_backward.default, lambda original, *given: without_summands(original(*given)))


# Gradients of activations.


@fault("mlp")
def gradient_of_the_input_not_summed(patch: Patch) -> None:
    patch.setattr(Summed, "begin", lambda self, contribution: lambda: contribution)


@fault("images")
def gradient_of_the_input_scattered_to_the_wrong_rows(patch: Patch) -> None:
    def change(original: Any, self: Scattered, contribution: Tensor) -> Any:
        return original(self, contribution.roll(1, self.dimension))

    around(patch, Scattered, "begin", change)


@fault("strips")
def gradient_of_a_halo_not_returned(patch: Patch) -> None:
    around(patch, layer._Step, "_returned", lambda original, *given: [(block, part * 0) for block, part in original(*given)])


# Activations.


@fault("transformer")
def products_of_rows_not_summed(patch: Patch) -> None:
    patch.setattr(linear, "add_up", lambda x, site: x)


@fault("transformer")
def bias_added_by_every_row(patch: Patch) -> None:
    def forward(original: Any, self: linear.Linear, x: Tensor) -> Tensor:
        found: Tensor = original(self, x)
        return found if not self.input_divided or self.bias is None else found + self.bias * (self.site.rows - 1)

    around(patch, linear.Linear, "forward", forward)


@fault("mlp")
def summands_taken_for_sums(patch: Patch) -> None:
    def change(original: Any, self: World, value: Placed, target: Any, label: Any = None) -> Tensor:
        shape = tuple(value.shape)
        plain = Placed(value.local, replace(value.placement, summands="none"), shape, self)
        return original(self, plain, replace(target, summands="none"), label)  # type: ignore[no-any-return]

    around(patch, World, "relaid", change)


@fault("mlp")
def a_gathered_tensor_off_by_one(patch: Patch) -> None:
    from zmqtrain.parallel.placed import tensor

    around(patch, tensor, "carry", lambda original, *given: original(*given).roll(1, -1))


@fault("mlp")
def a_part_cut_off_by_one(patch: Patch) -> None:
    def change(original: Any, self: Shard, whole: Tensor, row: int) -> Tensor:
        return original(self, whole if self.dimension is None else whole.roll(1, self.dimension), row)  # type: ignore[no-any-return]

    around(patch, Shard, "cut", change)


@fault("strips")
def a_halo_row_missing(patch: Patch) -> None:
    around(patch, HaloExchange, "arrived", lambda original, *given: ((part, tensor * 0) for part, tensor in original(*given)))


@fault("mlp")
def a_mean_of_own_elements(patch: Patch) -> None:
    patch.setattr(reductions, "summed", lambda placement, gone: replace(_summed(placement, gone), summands="none"))


_summed = reductions.summed


@fault("mlp")
def a_softmax_of_own_classes(patch: Patch) -> None:
    def change(original: Any, world: World, func: Any, args: Any, kwargs: Any) -> Placed:
        value: Placed = args[0]
        return Placed(func(value.local, *args[1:]), value.placement, tuple(value.shape), world)

    rule(patch, aten._softmax.default, change)


@fault("mlp")
def a_product_of_own_elements(patch: Patch) -> None:
    patch.setattr(products, "_summands", lambda inner: "none")


@fault("images")
def a_slice_off_by_one(patch: Patch) -> None:
    def change(original: Any, world: World, func: Any, args: Any, kwargs: Any) -> Any:
        value, along, start, stop = args[0], *args[1:4]
        if along == 1 and start == 0 and stop is not None and stop < value.shape[1]:
            start, stop = start + 1, stop + 1
        return original(world, func, [value, along, start, stop, *args[4:]], kwargs)

    rule(patch, aten.slice.Tensor, change)


@fault("images")
def tensors_joined_in_another_order(patch: Patch) -> None:
    rule(
        patch,
        aten.cat.default,
        lambda original, world, func, args, kw: original(world, func, [[*reversed(args[0])], *args[1:]], kw),
    )


@fault("images")
def a_change_in_place_that_is_lost(patch: Patch) -> None:
    rule(patch, aten.add_.Tensor, lambda original, world, func, args, kwargs: args[0])


@fault("transformer")
def features_of_words_in_another_order(patch: Patch) -> None:
    around(patch, embedding, "gather", lambda original, x, dim, *rest: original(x, dim, *rest).flip(dim))


@fault("lstm")
def hidden_states_in_another_order(patch: Patch) -> None:
    around(patch, lstm, "gathered", lambda original, x, dim, *rest: original(x, dim, *rest).flip(dim))


@fault("batch")
def targets_of_other_samples(patch: Patch) -> None:
    def output_range(self: ParallelModel) -> slice:
        found = _output_range(self)
        return slice(0, found.stop - found.start)

    patch.setattr(ParallelModel, "output_range", output_range)


_output_range = ParallelModel.output_range


# Statistics and state.


@fault("images")
def statistics_of_own_samples(patch: Patch) -> None:
    def change(original: Any, world: World, *rest: Any) -> Any:
        world.statistics = "local"
        return original(world, *rest)

    around(patch, norms, "_layer", change)


@fault("images")
def running_statistics_that_do_not_run(patch: Patch) -> None:
    def change(original: Any, self: Any, *given: Any) -> None:
        original(self, *given)
        self.part = None if self.part is None else self.part.clone()

    around(patch, norms._Buffer, "__init__", change)
    patch.setattr(norms._Buffer, "keep", lambda self: None)


@fault("images")
def running_statistics_of_another_momentum(patch: Patch) -> None:
    for kind in (BatchNorm, DomainBatchNorm2d):

        def change(original: Any, self: Any, x: Tensor) -> Tensor:
            self.momentum = 0.3
            return original(self, x)  # type: ignore[no-any-return]

        around(patch, kind, "forward", change)


@fault("mlp")
def a_stale_buffer(patch: Patch) -> None:
    def put_back(self: Swap, tensors: Any, name: str, tensor: Tensor, *rest: Any) -> None:
        tensors[name] = tensor

    patch.setattr(Swap, "_put_back", put_back)


@fault("mlp")
def a_frozen_training(patch: Patch) -> None:
    patch.setattr(ParallelModel, "train", nn.Module.train)


@fault("mlp")
def a_weight_of_the_step_before(patch: Patch) -> None:
    kept: dict[Any, Tensor] = {}

    def change(original: Any, use: Any, world: World) -> Placed:
        key = world.rank, use.layer, use.name
        kept.setdefault(key, use.leaf.detach().clone())
        found: Placed = original(use if torch.is_grad_enabled() else replace(use, leaf=kept[key]), world)
        found.use = use
        return found

    around(patch, swap, "wrapped", change)


# Parameters that a forward changes.


@fault("teacher")
def an_assignment_without_effect(patch: Patch) -> None:
    patch.setattr(parameters.Use, "write", lambda *_: None)


@fault("teacher")
def an_average_of_its_own(patch: Patch) -> None:
    rule(patch, aten.lerp_.Scalar, lambda original, world, func, args, kwargs: args[0])


# Random numbers.


@fault("mlp")
def masks_of_each_process_alone(patch: Patch) -> None:
    def change(original: Any, self: Masks, *given: Any) -> Tensor:
        return original(self, *given[:-1], given[-1] + self.site.rank)  # type: ignore[no-any-return]

    around(patch, Masks, "of_block", change)


@fault("mlp")
def masks_that_do_not_scale(patch: Patch) -> None:
    patch.setattr(Masks, "_scale", staticmethod(lambda *given: (_scale(*given) > 0).to(given[-1].dtype)))


_scale = Masks._scale


@fault("mlp")
def dropout_in_evaluation(patch: Patch) -> None:
    original = FUNCTIONS[functional.dropout]
    patch.setitem(
        FUNCTIONS, functional.dropout, lambda input, p=0.5, training=True, inplace=False: original(input, p, True, inplace)
    )


@fault("mlp")
def noise_of_each_process_alone(patch: Patch) -> None:
    def change(original: Any, world: World, func: Any, args: Any, kwargs: Any) -> Placed:
        value: Placed = args[0]
        local = func(value.local, **kwargs)
        return Placed(local, replace(value.placement, summands="none"), tuple(value.shape), world)

    rule(patch, aten.rand_like.default, change)


@fault("mlp")
def another_seed_each_step(patch: Patch) -> None:
    patch.setattr(model, "step_seed", lambda seed, step: seed + step)
