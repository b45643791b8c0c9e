"""The FC server's fully connected layers in torch, on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.errors import CheckpointError, ProtocolError, TaskError
from zmqtrain.exchange.checkpoint_part import taking_back
from zmqtrain.exchange.optimizer import describe_optimizer, require_state, set_hyperparameters
from zmqtrain.membership.alike import Facts
from zmqtrain.merged_fc.executor import BatchPart, ExecutorState, Trained
from zmqtrain.merged_fc.gradients import GroupGradients
from zmqtrain.merged_fc.layers import FcLayers
from zmqtrain.merged_fc.queue import Applied, Turn
from zmqtrain.train.device.base import Device
from zmqtrain.train.linear import SMALLEST_BYTES, write_gradients_to
from zmqtrain.train.loss_trial import Trials
from zmqtrain.train.metrics import Metrics
from zmqtrain.train.random_state import random_state, restore_random_state
from zmqtrain.train.step import Precision, autocast
from zmqtrain.train.structure import put_together, stacked
from zmqtrain.train.task import Task, user_code
from zmqtrain.train.weighting import LOSSES_TRIED, require_mean
from zmqtrain.wire.payload import Value
from zmqtrain.wire.tensor import TensorPayload


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """How the FC server computes."""

    groups: int
    together: bool
    """Whether an update uses the gradients of all groups."""
    precision: Precision = "float32"
    stop_on_nan: bool = True


#: The group of a turn that does not count: its gradients are beside those of all groups.
NO_GROUP = -1


class TorchExecutor:
    """Implements `zmqtrain.merged_fc.executor.Executor`. Made in the compute thread; the optimizer has this phase's parameters."""

    def __init__(
        self, task: Task, layers: FcLayers, optimizer: Optimizer, device: Device, settings: ExecutorSettings, facts: Facts
    ) -> None:
        self._task, self._layers, self._phase, self._optimizer = task, layers, layers.module, optimizer
        self.facts = facts
        """What it must have as the workers do."""
        self._device, self._settings = device, settings
        self._metrics = Metrics(task) if task.eval_data is not None else None
        self._base = describe_optimizer(optimizer).groups
        # Parameter groups of the task's optimizer without any of these parameters are left out of its steps.
        self._owned = [number for number, group in enumerate(optimizer.param_groups) if group["params"]]
        optimizer.param_groups[:] = [optimizer.param_groups[number] for number in self._owned]
        self._parameters: list[nn.Parameter] = [each for group in optimizer.param_groups for each in group["params"]]
        self._gradients = GroupGradients(self._parameters)
        self._unreached: dict[int, set[int]] = {}  # group -> the parameters that no backward of its step has reached
        self._changed: dict[int, Sequence[Mapping[str, Value] | None] | None] = {}  # group -> hyperparameters changed at its step
        self._now: Sequence[Mapping[str, Value] | None] | None = None
        self._trials = Trials(LOSSES_TRIED)
        self._places: list[Tensor | None] = [None] * len(self._parameters)  # where the running backward may write
        number_of = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        for module in self._phase.modules():
            if type(module) is nn.Linear and id(module.weight) in number_of and module.weight.nbytes >= SMALLEST_BYTES:
                write_gradients_to(module, partial(self._memory_for, number_of[id(module.weight)]))

    # zmqtrain.merged_fc.executor.Executor, on the loop's thread.

    async def train(self, turn: Turn, parts: Sequence[BatchPart]) -> Trained:
        return await self._device.run(lambda: self._train(turn, parts))

    async def update(self, applied: Applied) -> None:
        await self._device.run(lambda: self._update(applied))

    async def evaluate(self, part: BatchPart) -> list[float]:
        return await self._device.run(lambda: self._evaluate(part))

    async def state(self) -> ExecutorState:
        return await self._device.run(self._state)

    async def become(self, state: ExecutorState) -> None:
        model = {f"state/{name}": tensor for name, tensor in state.model.items()}
        await self._device.run(lambda: self.restore(model | state.more, state.sidecar))

    # In the compute thread.

    def _train(self, turn: Turn, parts: Sequence[BatchPart]) -> Trained:
        start = self._device.clock()
        meta = parts[0].meta
        inputs, target = self._batch(parts)
        for tensor, wanted in zip(inputs, meta.wanted, strict=True):
            tensor.requires_grad_(wanted)
        buffers = [] if turn.counts else [(buffer, buffer.clone()) for buffer in self._phase.buffers()]
        self._phase.train()
        with autocast(self._device.torch_device, self._settings.precision):
            with user_code("the model's forward"):
                output = self._layers(inputs, turn)
            with user_code("Task.loss(output, target)"):
                loss = self._layers.loss(self._task.loss, output, target)
                samples = sum(part.meta.samples for part in parts)
                divides = meta.micro_batches > 1 or (self._settings.together and self._settings.groups > 1)
                looks = divides and samples > 1 and isinstance(loss, Tensor) and loss.numel() == 1
                if looks and self._trials.due(loss, samples, read=loss.device.type == "cpu"):
                    require_mean(self._task.loss, output, target, samples, loss.detach())
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            pair = ", and with merged_fc not a pair (sum, weight)" if isinstance(loss, tuple) else ""
            raise TaskError(
                f"Task.loss(output, target) must return the mean loss: a tensor of one element that requires a gradient{pair}"
            )
        value = float(loss.detach())
        if not math.isfinite(value) and self._settings.stop_on_nan:
            return Trained(value, self._device.clock() - start, tuple(() for _ in parts))
        with user_code("the backward pass"):
            self._backward(turn.group if turn.counts else NO_GROUP, loss * (samples / meta.divisor))
        gradients = tuple(_gradients(inputs, meta.wanted, parts))
        if not turn.counts:
            self._gradients.discard(NO_GROUP)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            return Trained(value, self._device.clock() - start, gradients)
        self._changed[turn.group] = meta.hyperparameters
        if turn.last:
            self._gradients.complete(turn.group, range(self._settings.groups) if self._settings.together else (turn.group,))
        return Trained(value, self._device.clock() - start, gradients)

    def _batch(self, parts: Sequence[BatchPart]) -> tuple[list[Tensor], Any]:
        """The group's inputs of the phase, and the target."""
        count = len(parts[0].meta.wanted)
        tensors = stacked([[_tensor(each) for each in part.tensors] for part in parts])
        moved = [each.to(self._device.torch_device) for each in tensors]
        return [each.detach() for each in moved[:count]], put_together(parts[0].meta.structure, moved[count:])

    def _backward(self, group: int, loss: Tensor) -> None:
        own = self._gradients.of(group)
        if not self._gradients.begun(group):
            self._unreached[group] = set(range(len(own)))
        unreached = self._unreached[group]
        for number, (parameter, place) in enumerate(zip(self._parameters, own, strict=True)):
            first = number in unreached
            parameter.grad = None if first else place
            self._places[number] = place if first else None
        loss.backward()  # type: ignore[no-untyped-call]
        for number, (parameter, place) in enumerate(zip(self._parameters, own, strict=True)):
            if parameter.grad is None:
                place.zero_()
                continue
            unreached.discard(number)
            if parameter.grad.data_ptr() != place.data_ptr():
                place.copy_(parameter.grad)
            parameter.grad = None
        self._gradients.written(group)

    def _memory_for(self, number: int) -> Tensor | None:
        """Where backward may write a weight's gradient: the first one of a step is written into the group's set."""
        place, self._places[number] = self._places[number], None
        return None if place is None else place.detach()

    def _update(self, applied: Applied) -> None:
        changed = self._changed.get(applied.groups[0])
        if changed != self._now:
            if changed is not None and len(changed) != len(self._base):
                raise ProtocolError(f"a worker's optimizer has {len(changed)} parameter groups, the FC server's {len(self._base)}")
            now = [{**self._base[number], **((changed[number] if changed else None) or {})} for number in self._owned]
            set_hyperparameters(self._optimizer, now)
            self._now = changed
        mean = self._gradients.mean()
        unreached = set.intersection(*(self._unreached[group] for group in applied.groups))
        for number, (parameter, gradient) in enumerate(zip(self._parameters, mean, strict=True)):
            parameter.grad = None if number in unreached else gradient  # the optimizer skips None
        with user_code("the optimizer's step()"):
            self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        self._gradients.release()

    def _evaluate(self, part: BatchPart) -> list[float]:
        if self._metrics is None:
            raise ProtocolError("the task has no eval_data, so there is nothing to evaluate")
        inputs, target = self._batch([part])
        self._phase.eval()
        with torch.no_grad(), autocast(self._device.torch_device, self._settings.precision):
            with user_code("the model's forward, in evaluation"):
                output = self._layers(inputs)
            sums = self._metrics.zeros()
            self._metrics.add(sums, output, target, part.meta.samples)
        return [float(each) for each in sums]

    def _state(self) -> ExecutorState:
        model = {name: _copied(value) for name, value in self._phase.state_dict().items() if isinstance(value, Tensor)}
        more = {f"buffer/{name}": _copied(buffer) for name, buffer in self._phase.named_buffers() if name not in model}
        for name, parameter in self._phase.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if value is not None:
                    more[f"optimizer/{key}/{name}"] = _copied(value) if isinstance(value, Tensor) else torch.tensor(value)
        tensors, random = random_state(self._device.torch_device)
        parts = self._layers.parts
        return ExecutorState(parts.whole(model), parts.whole(more) | tensors, {"random": random})

    def restore(self, tensors: Mapping[str, Tensor], sidecar: Mapping[str, Any]) -> None:
        """Restore what `state` returned, with the model's tensors as ``state/NAME``. Raises `CheckpointError` if they belong to
        another model."""
        self.begin_with(tensors)
        parameters = dict(self._phase.named_parameters())
        states: dict[str, dict[str, Tensor]] = {}
        with taking_back("fc-0"):
            for name, tensor in self._layers.parts.cut(tensors).items():
                kind, _, rest = name.partition("/")
                if kind == "optimizer":
                    key, _, parameter = rest.partition("/")
                    states.setdefault(parameter, {})[key] = tensor
            for parameter, state in states.items():
                owner = parameters[parameter]
                require_state(self._optimizer, parameter, owner, state)
                for key, tensor in state.items():
                    kept = tensor.clone() if tensor.shape != owner.shape else torch.empty_like(owner).copy_(tensor)
                    self._optimizer.state[owner][key] = kept
            restore_random_state(self._device.torch_device, dict(tensors), sidecar["random"])

    def begin_with(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the phase with a model's tensors, ``state/NAME``, and nothing else. Raises `CheckpointError` for another model's."""
        tensors = self._layers.parts.cut(tensors)
        state = self._phase.state_dict(keep_vars=True)
        targets = {f"state/{name}": value for name, value in state.items() if isinstance(value, Tensor)}
        lasting = {f"buffer/{name}": buffer for name, buffer in self._phase.named_buffers() if name not in state}
        targets |= {name: buffer for name, buffer in lasting.items() if name in tensors}
        for name, target in targets.items():
            source = tensors.get(name)
            if source is None or source.shape != target.shape or source.dtype != target.dtype:
                found = "nothing" if source is None else f"{source.dtype} {list(source.shape)}"
                raise CheckpointError(
                    f"the checkpoint has {found} as the FC server's {name}, but {target.dtype} {list(target.shape)} is needed: "
                    "resume with the model and the [exchange] split of the run that wrote it"
                )
            with torch.no_grad():
                target.copy_(source)


def _gradients(inputs: Sequence[Tensor], wanted: Sequence[bool], parts: Sequence[BatchPart]) -> list[tuple[TensorPayload, ...]]:
    """The rows of the inputs' gradients that belong to each part."""
    whole = []
    for tensor, want in zip(inputs, wanted, strict=True):
        if want:
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            whole.append(gradient.to("cpu").contiguous())
    found, start = [], 0
    for part in parts:
        stop = start + part.meta.samples
        found.append(tuple(TensorPayload.of(each[start:stop]) for each in whole))
        start = stop
    return found


def _tensor(payload: object) -> Tensor:
    if not isinstance(payload, TensorPayload):
        raise ProtocolError("workers sent only sizes as activations, but the FC server computes")
    return payload.tensor


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
