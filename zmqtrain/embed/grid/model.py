"""A script's model that its group divides over a grid. It stays the script's own object, and so does its optimizer.

Its parameters become this worker's parts of themselves, and its forward the divided one: the column's samples go in, and outputs of
all of these come out, on each worker of the column. Gradients of outputs are weighted by the column's part of the group's samples,
so that the group's gradients add up to that of the mean over all of them. At the end of the session the model is whole again.
"""

from __future__ import annotations

import copy
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.optim import Optimizer

from zmqtrain.collectives.group import bounds
from zmqtrain.data.batch import Batch
from zmqtrain.embed.gradients import HARMLESS, Watch
from zmqtrain.embed.grid.digest import digest
from zmqtrain.embed.grid.meeting import Meetings, What
from zmqtrain.embed.grid.parts import NO_COPY, Guard, PartGradient, PartParameter, guarded, unguarded
from zmqtrain.embed.grid.states import States
from zmqtrain.embed.scope import sum_and_norm, tolerance_of
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.events import Recorder
from zmqtrain.parallel.copying import copied
from zmqtrain.parallel.network import NetworkFabric
from zmqtrain.parallel.placed.model import ParallelModel, map_tensors
from zmqtrain.parallel.placed.tensor import Placed
from zmqtrain.parallel.shard import Shard
from zmqtrain.parallel.turns import turn
from zmqtrain.parallel.verify.case import NotComparable
from zmqtrain.parallel.verify.verdict import ramp
from zmqtrain.topology.schema import Topology
from zmqtrain.train.divided import divide, parallel_model
from zmqtrain.train.hooks import OwnHook
from zmqtrain.train.verifying import verify_model


class DividedScript:
    """One worker's part of a script's model. Used in the script's own thread, except where it says otherwise."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        topology: Topology,
        fabrics: tuple[NetworkFabric, NetworkFabric],
        meetings: Meetings,
        wait: Callable[[Coroutine[Any, Any, Any], str], Any],
        recorder: Recorder,
        *,
        served: bool,
        references: tuple[int, ...] = (),
    ) -> None:
        """Divides the model, of which all workers must have equal ones.

        ``fabrics``: for the model, and for its comparison with the ordinary one. ``wait`` waits for a coroutine on the loop's
        thread. ``served``: model servers run the optimizer. ``references``: as in `zmqtrain.parallel.verify.Case`.

        Raises `TaskError` and `UsageError`."""
        self.model, self.optimizer = model, optimizer
        self._topology, self._recorder, self._served = topology, recorder, served
        self._fabric, self._verifying = fabrics
        self._references = references
        self._meetings, self._wait = meetings, wait
        self.guard = Guard(self.meet)
        self.weight = 1.0
        """The column's part of the group's samples, in the last forward."""
        self.samples = (0, 0)
        """Those of the column and of the group, in the last forward with gradients."""
        self._inside = False
        self._closed = False
        self._forwards = 0  # in training
        self._undo: list[Callable[[], None]] = []
        self._refuse(model)
        self._ordinary = copied(self.model) if topology.parallel.verify else None
        if topology.parallel.verify and self._ordinary is None:
            self._not_compared("the model cannot be copied, or has hooks or functions of its own that refer to it")
        wholes = _parameters(model)
        with turn():
            self.parallel = divide(model, topology, self._fabric, recorder)
        if self.parallel.grid.columns != topology.compute.columns:
            raise UsageError(
                f"the plan's first layer that is divided over rows has the grid {self.parallel.grid}, whose columns have other "
                f"samples than those of [compute] grid, {topology.compute.grid}: let both be the same"
            )
        self.parallel.gives_columns = True
        self.shards = self.parallel.shards_by_name()
        in_optimizer = {id(each) for group in optimizer.param_groups for each in group["params"]}
        self.trained = [
            name for name, whole in model.named_parameters() if whole.requires_grad and id(wholes[name]) in in_optimizer
        ]
        """The names of trained parameters, the same on all workers."""
        self._row = self.parallel.grid.place(self._fabric.rank)[0]
        self._keep_parameters(wholes)
        self.states = States(self, self._served)
        self._take_forward()
        for name, parameter in self.model.named_parameters():
            guarded(name, parameter, self.guard)

    @property
    def counts(self) -> bool:
        """Whether this worker's samples are counted, and not those of another worker with the same samples."""
        return self._row == 0

    @property
    def inside(self) -> bool:
        """Whether the divided model's forward runs, or its comparison with the ordinary one."""
        return self._inside

    @property
    def rows(self) -> int:
        """How many workers have the same samples."""
        return self.parallel.grid.rows

    def meet(self, what: What, numbers: Sequence[float] = ()) -> list[list[float]]:
        """See `Meetings.meet`."""
        said: list[list[float]] = self._wait(self._meetings.meet(what, numbers), what)
        return said

    def part_of(self, gradient: Tensor, watch: Watch | None, name: str) -> Tensor | None:
        """A whole gradient's part, as loops may see it; ``None``: the gradient of ``name`` is not in parts."""
        shard = self.shards[name]
        if shard.dimension is None:
            return None
        return PartGradient.part(gradient, watch or Watch(), self.guard, name, shard)

    # Beginning.

    def _refuse(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter._backward_hooks:
                raise TaskError(
                    f"the parameter {name!r} has a hook (register_hook), which would see a part of its gradient only, since "
                    "[compute] grid divides the model: leave the hook out, or remove grid"
                )
        if type(self.optimizer) is torch.optim.LBFGS:
            raise TaskError("LBFGS looks at all parameters together, of which each worker has parts only: remove [compute] grid")

    def _keep_parameters(self, wholes: Mapping[str, nn.Parameter]) -> None:
        """Parameters stay the objects that they were, which the script, its optimizer and its schedules know."""
        state: Mapping[Any, Any] = self.optimizer.state
        for name, module in self.model.named_modules(remove_duplicate=False):
            for own, part in list(module._parameters.items()):
                whole = wholes[f"{name}.{own}" if name else own] if part is not None else None
                if whole is None or part is None or part is whole:
                    continue
                if whole.shape != part.shape:  # a shared one comes again
                    shard = self.shards[f"{name}.{own}" if name else own]
                    gradient = None if whole.grad is None else self.cut(whole.grad, shard)
                    for key, tensor in state.get(whole, {}).items():
                        if isinstance(tensor, Tensor) and tuple(tensor.shape) == shard.shape:
                            state[whole][key] = self.cut(tensor, shard)
                    whole.grad = None
                    whole.data = part.data
                    whole.grad = gradient
                module._parameters[own] = whole
                if not name:
                    self.parallel._parameters[own] = whole

    def cut(self, whole: Tensor, shard: Shard) -> Tensor:
        """The part of a whole parameter that this worker has."""
        return shard.cut(whole, shard.members.index(self._fabric.rank))

    def is_part(self, tensor: Tensor, shard: Shard) -> bool:
        """Whether a tensor has the shape of this worker's part, and is not whole."""
        return shard.dimension is not None and tuple(tensor.shape) == shard.local_shape(shard.members.index(self._fabric.rank))

    # The forward.

    def _take_forward(self) -> None:
        model = self.model
        forward = model.forward
        had = vars(model).get("forward")
        self.parallel.run_by(forward)
        self.parallel.watch_uses(self._used)

        def divided(*inputs: Any, **named: Any) -> Any:
            return forward(*inputs, **named) if self._inside else self._forward(inputs, named)

        def copied(*_: object) -> Any:
            raise TaskError(NO_COPY)

        model.forward = divided
        model.__deepcopy__ = model.__reduce_ex__ = copied  # type: ignore[assignment, method-assign]

        def restore() -> None:
            del model.forward, model.__deepcopy__, model.__reduce_ex__
            if had is not None:
                model.forward = had

        self._undo.append(restore)
        for name, module in model.named_modules():
            if name:
                hook = module.register_forward_pre_hook(OwnHook(partial(self._called, name)), prepend=True)
                self._undo.append(hook.remove)

    def _called(self, name: str, module: nn.Module, inputs: Any) -> None:
        if not self.guard.open and not self._inside:
            raise TaskError(
                f"the layer {name!r} was called by itself, but [compute] grid divides the model: call the whole model, whose "
                "forward may do anything, or remove grid"
            )

    def _used(self, function: Callable[..., Any]) -> None:
        if not (self._inside or self.guard.open or function in HARMLESS):
            raise TaskError(
                f"{getattr(function, '__name__', function)} of an activation within the model (kept by a hook, or in an attribute) "
                "outside of the model's forward: [compute] grid divides the model, so it is of other workers' samples, too. "
                "Return it from the model's forward, as an output"
            )

    def _forward(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if self._closed:
            raise TaskError("the session has ended with an error, and has left its model divided over [compute] grid")
        if torch.compiler.is_dynamo_compiling():
            raise TaskError("torch.compile of a model that [compute] grid divides is not possible: leave it out, or remove grid")
        self.guard.depth = self.guard.reading = 0  # where an earlier call has ended with an error
        self.guard.in_backward = False
        mine = self._begin(inputs, named)
        batch = self.parallel.batch
        if self._ordinary is not None and torch.is_grad_enabled() and self.model.training:
            self._verify(inputs, named, mine)
        weight = self.weight = mine / batch.size
        step = self._forwards
        self._forwards += self.model.training
        batch.step = step
        if torch.is_grad_enabled():
            self.samples = mine, batch.size
            inputs, named = map_tensors((inputs, dict(named)), partial(_unweighted, weight))
        self._inside = True
        try:
            with self.guard.opened():
                output = self.parallel(*inputs, **named)
        finally:
            self._inside = False
        return map_tensors(output, partial(self._leaving, weight, (batch.size, step)))

    def _begin(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> int:
        """Agree on the group's samples. Returns those of this worker's column. Raises `TaskError`, on all workers."""
        tensors: list[Tensor] = []
        map_tensors((inputs, dict(named)), lambda each: None if isinstance(each, Placed) else tensors.append(each))
        lengths = [each.shape[0] for each in tensors if each.dim()]
        mine = next((length for length in lengths if length != 1), lengths[0] if lengths else -1)
        modes = zlib.crc32(bytes(module.training for module in self.model.modules()))
        said = self.meet("the model's forward", [mine, modes, torch.is_grad_enabled(), self._forwards, digest(tensors)])
        grid = self.parallel.grid
        if any(numbers[0] < 0 for numbers in said):
            raise TaskError(
                "the model's forward needs a tensor, with samples along its first dimension, where [compute] grid divides it"
            )
        if not all(isinstance(each, PartParameter) for each in self.model.parameters()):
            raise TaskError(
                "parameters of the model were replaced after session.replicate() (load_state_dict(..., assign=True)?), so that "
                "they would not be trained: change them in place, by model.load_state_dict()"
            )
        if any(numbers[1:4] != said[0][1:4] for numbers in said):
            raise TaskError(
                "the workers of a group call the model in different modes (model.train() and model.eval(), or torch.no_grad()): "
                "[compute] grid divides the model, so all of them must evaluate together"
            )
        columns = [[said[rank] for rank in grid.column(grid.rank(0, column))] for column in range(grid.columns)]
        for column in columns:
            if any((numbers[0], numbers[4]) != (column[0][0], column[0][4]) for numbers in column):
                raise TaskError(
                    "the workers of a column of [compute] grid have called the model with different samples. They divide the "
                    "model, not the samples, and must have the same, with the same random changes: take them from "
                    "session.batches(), or choose them by session.group and session.column, and seed random numbers by these"
                )
        sizes = [int(column[0][0]) for column in columns]
        if sizes != [stop - start for start, stop in bounds(sum(sizes), grid.columns)]:
            raise TaskError(
                f"the columns of [compute] grid have called the model with {', '.join(map(str, sizes))} samples: they must have "
                "equally many, or the first ones one more than the others"
            )
        if not sum(sizes):
            raise TaskError("the model was called without samples by all workers of the group")
        self.parallel.batch.size = sum(sizes)
        return mine

    def _leaving(self, weight: float, batch: tuple[int, int], output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(partial(self._backward, weight, batch))  # type: ignore[no-untyped-call]
            return output.view_as(output)  # whose gradients others may look at without beginning a backward
        return output

    def _backward(self, weight: float, batch: tuple[int, int], gradient: Tensor) -> Tensor:
        """Backward has come to an output."""
        if torch.is_grad_enabled():
            raise TaskError(
                "create_graph=True: a model that [compute] grid divides cannot be differentiated twice (a penalty on gradients, "
                "second derivatives): remove grid"
            )
        if not self.guard.in_backward:
            self.guard.in_backward = True
            Variable._execution_engine.queue_callback(self._backward_ended)
        mine = sum_and_norm([gradient])
        said = self.meet("backward()", [*mine, float(batch[1])])
        tolerance = tolerance_of([gradient.dtype])
        grid = self.parallel.grid
        for rank in grid.column(self._fabric.rank):
            apart = [abs(one - other) for one, other in zip(said[rank][:2], mine, strict=True)]
            if max(apart) > tolerance * (abs(mine[0]) + mine[1]) or said[rank][2] != batch[1]:
                raise TaskError(
                    "the workers of a column of [compute] grid have different losses: they divide the model and have the same "
                    "samples, so they must compute the same loss of the same targets"
                )
        # What backward computes again (torch.utils.checkpoint) is of that forward's samples, and drops what that one dropped.
        self.parallel.batch.size, self.parallel.batch.step = batch
        return gradient * weight

    def _backward_ended(self) -> None:
        self.guard.in_backward = False

    # The comparison with the ordinary model.

    def _verify(self, inputs: tuple[Any, ...], named: Mapping[str, Any], samples: int) -> None:
        """Compare the divided model with the ordinary one, before its first step."""
        kept, self._ordinary = self._ordinary, None
        assert kept is not None
        device = next(self.model.parameters()).device
        batch = Batch(tuple(map_tensors(inputs, Tensor.detach)), None, samples, named=map_tensors(dict(named), Tensor.detach))
        before = self.parallel.batch.size

        def divide_again() -> ParallelModel:
            found = parallel_model(copy.deepcopy(kept), self._topology, self._verifying)
            found.gives_columns = True
            return found

        self._inside = True
        try:
            with self.guard.opened(), torch.enable_grad():
                found = verify_model(
                    lambda: copy.deepcopy(kept),
                    divide_again,
                    ramp,
                    None if self._served else self._another_optimizer,
                    self._topology,
                    self._verifying,
                    self.parallel.grid,
                    batch,
                    device,
                    references=self._references,
                )
        except NotComparable as reason:
            self._not_compared(str(reason))
        else:
            self._recorder.event("verified", samples=found.samples, precision=found.precision, images=found.images)
        finally:
            self._inside = False
            self.parallel.batch.size = before

    def _not_compared(self, reason: str) -> None:
        self._recorder.event("warning", text=f"the divided model was not compared with the ordinary one: {reason}")

    def _another_optimizer(self, model: nn.Module) -> Optimizer:
        """An optimizer like the script's, of another model's parameters of the same names."""
        own = self.optimizer
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        there = dict(model.named_parameters())
        groups = [
            {**group, "params": [there[names[id(each)]] for each in group["params"] if id(each) in names]}
            for group in own.param_groups
        ]
        found: Optimizer = object.__new__(type(own))
        found.__dict__.update({key: value for key, value in vars(own).items() if key not in ("step", "zero_grad")})
        found.param_groups, found.state = groups, defaultdict(dict)
        found._optimizer_step_pre_hooks, found._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        return found

    # The end.

    def become_whole(self) -> None:
        """The session has ended in order: the model and the optimizer become ordinary ones again, and whole. All workers of the
        group call it, and hold the whole model then. Nothing else uses the model's parts any more."""
        with self.guard.opened(), torch.no_grad():
            wholes = list(self.states.of_optimizer()) if not self._served else []
            seen: dict[int, Tensor] = {}
            for name, module in self.model.named_modules(remove_duplicate=False):
                for tensors in (module._parameters, module._buffers):
                    for own, tensor in tensors.items():
                        shard = self.shards.get(f"{name}.{own}" if name else own)
                        if tensor is None or shard is None or shard.dimension is None or id(tensor) in seen:
                            if tensor is not None and id(tensor) in seen:
                                tensors[own] = seen[id(tensor)]
                            continue
                        whole = self.states.whole({own: tensor}, {own: shard})[own]
                        if isinstance(tensor, nn.Parameter):
                            tensor.grad = None
                            tensor.data = whole
                            seen[id(tensor)] = tensor
                        else:
                            seen[id(tensor)] = tensors[own] = whole
            for parameter, key, tensor in wholes:
                self.optimizer.state[parameter][key] = tensor
        self.release()

    def release(self) -> None:
        """Take back what was added to the model and to the optimizer."""
        self.states.release()
        for parameter in self.model.parameters():
            unguarded(parameter)
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [module._parameters.get(each) for each in module._flat_weights_names]
        while self._undo:
            self._undo.pop()()
        self.parallel.release()

    def end_steps(self, stop: Callable[[], Any]) -> Callable[[], None]:
        """The run has stopped, and the model is whole: ``stop()``, which raises, is what ``optimizer.step()`` does from now on.
        Returns what takes that back."""
        optimizer = self.optimizer
        had = vars(optimizer).get("step")
        optimizer.step = lambda *_, **__: stop()  # type: ignore[method-assign]

        def restore() -> None:
            del optimizer.step
            if had is not None:
                optimizer.step = had  # type: ignore[method-assign]

        return restore

    def leave_divided(self) -> None:
        """The session has ended by an error: the model stays divided, and can be used no more."""
        self._closed = True


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _unweighted(weight: float, value: Tensor) -> Tensor:
    """An input whose gradient the script may ask for: that of its own loss, which has no weight."""
    if not value.requires_grad or not weight:
        return value
    found = value.view_as(value)
    found.register_hook(lambda gradient: gradient / weight)  # type: ignore[no-untyped-call]
    return found
