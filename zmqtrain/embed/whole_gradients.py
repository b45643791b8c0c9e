"""Gradients that are whole as soon as ``backward()`` returns: ``grad`` contains the sum over all workers of the step.

Autograd adds each worker's own part to gradients. So before it adds, the old value of ``grad`` is put aside; at the end of the
backward the new parts are summed over the workers, and the old value is restored with the sum added. ``grad`` is an ordinary
tensor, which the user may read, change, keep or set to None.

Within ``accumulating()`` nothing is summed yet, and ``grad`` is a `PartGradient`. If it is something else when the next backward
reaches the parameter, the user has dropped what was added up (``zero_grad()``, ``grad = None``).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zmqtrain.embed.gradients import MIXED, PartGradient, Watch, WatchedGradient, plain
from zmqtrain.embed.scope import Scope
from zmqtrain.errors import TaskError
from zmqtrain.train.hooks import OwnHook
from zmqtrain.train.replica import TorchReplica
from zmqtrain.wire.tensor import TensorPayload

if TYPE_CHECKING:
    from zmqtrain.embed.grid.model import DividedScript


class _AdoptedHook:
    """Replaces a user's hook on a parameter, which is called later with the whole gradient."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor) -> None:
        return None


class WholeGradients:
    """The whole gradients of one replica. All methods in the caller's thread."""

    def __init__(
        self,
        replica: TorchReplica,
        scope: Scope,
        wait: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        divided: DividedScript | None = None,
    ) -> None:
        """``wait``: waits for a sum, which it begins. ``divided``: the model, if its group divides it."""
        self._replica, self._scope, self._wait, self._divided = replica, scope, wait, divided
        # A worker may have nothing of a divided parameter; all name the same ones.
        self._names = list(replica.named) if divided is None else divided.trained
        self._among = [scope.group, *(bucket.sharers(scope.group) for bucket in replica.buckets)]
        self._before: dict[str, Tensor | None] = {}  # the value of grad before this backward reached the parameter
        self._own: dict[str, Tensor] = {}  # this worker's part, not summed yet
        self._under: dict[str, Tensor | None] = {}  # the values of grad to which these will be added
        self._factor = 1.0  # the weight of this worker's part
        self._has = torch.zeros(len(self._names))
        self.watch: Watch | None = None
        """Whether a watched gradient was used, if gradients are watched."""

    @property
    def unsummed(self) -> bool:
        """Whether this worker has gradients that were not followed by a backward outside of accumulating()."""
        return bool(self._own)

    @property
    def incomplete(self) -> bool:
        """Whether a parameter had no gradient on any worker in the last sum, or has lost it since."""
        lost = any(parameter.grad is None for parameter in self._replica.parameters)
        return lost or bool((self._has < self._scope.group.size).any())

    def arriving(self, name: str, parameter: nn.Parameter) -> None:
        """Autograd is about to add to the parameter's gradient."""
        if name not in self._before:
            self._before[name] = parameter.grad
            parameter.grad = None

    def end_backward(self, factor: float, *, only_adding: bool) -> None:
        """Call this at the end of a backward. ``factor``: the weight of this worker's part."""
        named, before = self._replica.named, self._before
        self._before = {}
        for name in list(self._own):
            if not isinstance(before[name] if name in before else named[name].grad, PartGradient):
                del self._own[name], self._under[name]
        if self._own and factor != self._factor:
            raise TaskError(MIXED)
        self._factor = factor
        arrived = False
        for name, was in before.items():
            parameter = named[name]
            gradient, parameter.grad = parameter.grad, was
            if gradient is None:
                continue  # torch.autograd.grad() returned it to its caller
            arrived = True
            if gradient.requires_grad:
                raise TaskError(
                    "backward(create_graph=True) leaves gradients with a graph, which is not shared between workers: use "
                    "torch.autograd.grad(..., create_graph=True) for values to differentiate again, and backward() without it"
                )
            if name in self._own:
                self._own[name].add_(gradient)
                continue
            self._own[name], self._under[name] = gradient, was
            parameter.grad = PartGradient(parameter)
        if arrived and not only_adding:
            own, self._own = self._own, {}
            self._put_back()
            self._sum(own, factor)

    def drop(self) -> None:
        """Forget what was added up within accumulating(). ``grad`` is what it was before that: zeros if it was None, because
        there has been a gradient."""
        self._own.clear()
        self._put_back(zeros=True)

    def _put_back(self, *, zeros: bool = False) -> None:
        under, self._under = self._under, {}
        for name, was in under.items():
            parameter = self._replica.named[name]
            if isinstance(parameter.grad, PartGradient):
                parameter.grad = torch.zeros_like(parameter.detach()) if was is None and zeros else was

    def _sum(self, own: dict[str, Tensor], factor: float) -> None:
        replica, scope = self._replica, self._scope
        replica.memory.fill_gradients(own, factor)
        self._has = torch.tensor([float(name in own or name not in replica.named) for name in self._names])
        if not scope.alone:
            payloads = [TensorPayload.of(self._has), *(bucket.gradients for bucket in replica.buckets)]
            self._wait(lambda: scope.sum(payloads, self._among))
            replica.memory.fetch_gradients(1.0 / scope.groups)
        views = replica.memory.gradient_views()
        for name, has in zip(self._names, self._has.tolist(), strict=True):
            if not has or name not in replica.named:
                continue
            parameter = replica.named[name]
            whole = torch.empty_like(views[name]).copy_(views[name])
            for hook in list((parameter._backward_hooks or {}).values()):
                if isinstance(hook, _AdoptedHook) and (changed := hook.hook(whole)) is not None:
                    whole = changed
            if parameter.grad is not None:
                plain(parameter.grad).add_(whole)
            else:
                parameter.grad = self._shown(name, whole)

    def _shown(self, name: str, whole: Tensor) -> Tensor:
        """The gradient as the loop may see it."""
        part = None if self._divided is None else self._divided.part_of(whole, self.watch, name)
        if part is not None:
            return part
        return whole if self.watch is None else WatchedGradient.of(whole, self.watch)

    def unwatch(self) -> None:
        """Let the loop's gradients be ordinary tensors again, but for those of which this worker has parts."""
        self.watch = None
        for name, parameter in self._replica.named.items():
            if parameter.grad is not None:
                parameter.grad = self._shown(name, plain(parameter.grad))

    def adopt_hooks(self) -> bool:
        """Call the user's hooks on parameters with whole gradients. Returns whether there are new hooks."""
        found = False
        for parameter in self._replica.parameters:
            hooks = parameter._backward_hooks
            if hooks is None:
                continue
            for number, hook in hooks.items():
                if not isinstance(hook, _AdoptedHook) and not isinstance(hook, OwnHook):
                    hooks[number] = _AdoptedHook(hook)  # under its number, by which the user may remove it
                    found = True
        return found

    def release_hooks(self) -> None:
        """Restore the user's hooks."""
        for parameter in self._replica.parameters:
            hooks = parameter._backward_hooks or {}
            for number, hook in hooks.items():
                if isinstance(hook, _AdoptedHook):
                    hooks[number] = hook.hook
