"""A model and an optimizer of the user's own loop, kept in sync with the other workers.

The loop stays unchanged: the calls that it makes anyway tell how far it is. Gradients are handled in one of two ways:

*overlapped*: they are sent while backward is running, and are gone when it returns. A step is one backward (and those within
`accumulating` before it), then ``optimizer.step()``; reading a gradient in between raises an error (`GoneGradient`)::

    output = model(inputs)       each layer waits for its parameters when the forward reaches it
    loss.backward()              gradients leave, bucket by bucket
    optimizer.step()             the step ends: the exchange updates the model, or the optimizer does

*held*: they are summed over the workers when backward returns, and the user may read and change them (`WholeGradients`). The
exchange gets what ``optimizer.step()`` finds in ``grad``.

By default, a loop's first steps are held, and watched for anything that needs held gradients. Then all workers agree on one of the
two ways.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.optim import Optimizer

from zmqtrain.data.bridge import Bridge
from zmqtrain.embed.gradients import PartGradient, Watch, WatchedGradient, plain
from zmqtrain.embed.grid.parts import PartParameter
from zmqtrain.embed.guards import LOCAL, Guards, check_hooks, checksum, settings_of
from zmqtrain.embed.loss_watch import Batches, LossWatch
from zmqtrain.embed.other_loops import OtherLoops
from zmqtrain.embed.other_optimizers import OtherOptimizers
from zmqtrain.embed.overlapped import HOLD, Overlapped, Step, shown
from zmqtrain.embed.scope import Scope, StepState, sum_and_norm, tolerance_of
from zmqtrain.embed.whole_gradients import WholeGradients
from zmqtrain.errors import TaskError
from zmqtrain.exchange.base import Bucket, Exchange
from zmqtrain.train.hooks import OwnHook
from zmqtrain.train.own_samples import buffers_warning, differing_buffers, own_buffers
from zmqtrain.train.replica import TorchReplica
from zmqtrain.train.weighting import LOSSES_TRIED
from zmqtrain.waiting import together

if TYPE_CHECKING:
    from zmqtrain.embed.grid.model import DividedScript

T = TypeVar("T")
Wait = Callable[[Coroutine[Any, Any, T], str], T]
#: The number of watched steps: the second one begins with the gradients that the first has left.
WATCHED_STEPS = 2
#: The number of backwards in a session's first step after which the loop is checked for steps of its own.
BACKWARDS_WITHOUT_STEP = 8
OWN_GRADIENTS = (
    "torch.autograd.grad(..., create_graph=True) of the parameters gives gradients of each worker's own samples. In a loss that is "
    "right if a worker has whole tasks of its own (MAML), and wrong if they should be of the whole batch (a penalty on the norm of "
    "its gradient)"
)
SAME_SAMPLES = (
    f"all workers have had the same loss in {LOSSES_TRIED} steps, so they probably train on the same samples, which is no faster "
    "than one of them: take batches from session.batches(data, epoch), or choose samples by session.rank and session.world_size (a "
    "DataLoader that you iterate yourself is not divided)"
)


class Replicated:
    """Attached to a model and optimizer until `detach`."""

    def __init__(
        self,
        replica: TorchReplica,
        exchange: Exchange,
        bridge: Bridge,
        scope: Scope,
        others: OtherLoops,
        *,
        first_step: int,
        overlap: bool | None,
        served: bool,
        weight: Callable[..., float],
        share: Callable[[], tuple[int, int] | None],
        ended: Callable[[int, int, float, float], None],
        warn: Callable[[str], None],
        call_back: Callable[[], None],
        stops: Callable[[int], Coroutine[Any, Any, bool]],
        stop: Callable[[], None],
        wait: Wait[Any],
        divided: DividedScript | None = None,
    ) -> None:
        """Make it after the exchange has started.

        ``overlap``: see `zmqtrain.embed.session.Session.replicate`. ``served``: model servers run the optimizer. ``weight()``: the
        weight of this worker's gradient in its group; the group's weights add up to 1. ``weight(any_share=True)``: one that will be
        divided out. ``share()``: the number of samples in this worker's last batch, and in its group's, if known.
        ``ended(step, backwards, seconds, exposed_s)`` is called after each step, on the loop's thread, where ``warn(text)`` is
        called, too; ``call_back()`` in the caller's. ``stops(step)``: whether the run must stop before this step; then ``stop()``,
        in the caller's thread, ends the session and raises, now and at any later call. ``wait`` waits for a coroutine in the
        caller's thread. ``divided``: the model, if its group divides it."""
        self.replica, self.exchange, self.scope = replica, exchange, scope
        self.step = self.first_step = first_step
        self.others = others
        self._bridge, self._weight, self._ended, self._wait = bridge, weight, ended, wait
        self._served = served
        self._stops, self._stop, self._call_back, self._warn = stops, stop, call_back, warn
        self._stopped = False
        self._made = 0  # backwards since the last step
        self._remarks: set[str] = set()  # each is given once
        self._same_losses: set[float] = set()  # that all workers have had
        self._divided = divided
        self._opened: Callable[[], AbstractContextManager[None]] = nullcontext if divided is None else divided.guard.opened
        # Of these, workers have parts: what is compared between all is the rest.
        self._in_parts = {bucket.index for bucket in replica.buckets if bucket.rows is not None}
        self._names_in_parts = {name for bucket in replica.buckets if bucket.rows is not None for name in bucket.names}
        self._whole = WholeGradients(replica, scope, self._wait_for_sum, divided)
        self._guards = Guards(replica, served=served)
        self._watched_until = first_step + WATCHED_STEPS
        self._decided = overlap is not None or not exchange.exchanges(first_step)
        self._returns = overlap is not True  # all parameters are complete when optimizer.step() returns
        self._overlapped = Overlapped(replica)
        self._views = replica.memory.gradient_views()
        self._tolerance = tolerance_of([parameter.dtype for parameter in replica.parameters])
        self._in_backward = False
        self._backwards = 0  # of this step, outside of accumulating()
        self._asked = False  # the loop does something that needs held gradients
        self._settings: int = 0  # of the optimizer when this step's backward began
        self._weights = (0.0, 0.0)  # overlapped: sum and norm of a sample of them then
        self._losses = LossWatch(
            replica.model if self._divided is None else self._divided.model,
            replica.parameters,
            batches=self._batches,
            is_own_thread=self._is_the_scripts,
            remark=self._remark_soon,
            opened=self._opened,
        )
        self._share = share
        self._optimizers = OtherOptimizers(self, replica.optimizer, replica.parameters, self._is_own_thread)
        self._version = sum(parameter._version for parameter in replica.parameters)
        self._thread = 0  # where the model's last forward was
        self.is_updating = False  # the replica runs the local optimizer
        self._updated = False  # a closure has run it already
        self._begun = -1  # the exchange's current step; on the loop's thread
        self._began_s = bridge.loop.time()
        self._undo: list[Callable[[], None]] = []
        for parameter in replica.parameters:
            if parameter.grad is not None:  # the caller's previous value
                parameter.grad = parameter.grad.clone()
        replica.clears = False
        replica.entering = self._entering
        others.came_late = replica.abort
        replica.connect(self._bucket_ready)
        self._hold(overlap is False or not self._decided)
        if not self._decided:
            self._whole.watch = Watch()
        self._hook()
        self._patch(replica.optimizer)
        self._guards.passed(sampled=self._returns, keep=self.held)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """A backward in here only adds to the gradients; the last one of a step must be outside."""
        self._losses.only_adding = True
        try:
            yield
        finally:
            self._losses.only_adding = False

    def whole(self, what: str) -> list[nn.Parameter]:
        """The parameters with complete gradients, for ``what``. Raises `TaskError` if gradients have been sent already."""
        if not self.held:
            raise TaskError(f"{what} needs gradients that are kept until optimizer.step(): {HOLD}")
        if self._whole.unsummed:
            raise TaskError(f"{what}: the last backward() of a step must be outside of accumulating()")
        self._asked = True
        return self.replica.parameters

    def detach(self) -> None:
        """Restore the model and the optimizer to their original form. Idempotent."""
        with self._opened():
            self._detach()

    def _detach(self) -> None:
        self.replica.release()
        self._guards.release()
        self._whole.release_hooks()
        while self._undo:
            self._undo.pop()()
        for parameter in self.replica.parameters:
            parameter.grad = shown(parameter.grad)

    def check_weights(self) -> None:
        """Raise `TaskError` if weights were changed by hand and the change would be lost. Call it while the caller's thread
        waits."""
        with self._opened():
            self._guards.check_weights(sampled=self._returns)

    async def require_same_weights(self) -> None:
        """Raise `TaskError` if workers whose gradients are combined have different weights after the last step: one has restored
        its own best ones, for example. All of them call it, when their parameters are complete."""
        if not self.scope.alone and not self._served:  # those of model servers are compared with the servers'
            with self._opened():
                state = StepState(self.step, weights=self._sample(), tolerance=self._tolerance)
            await self.scope.agree(state)

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """See `zmqtrain.embed.session.Session.clip_grad_norm_`."""
        self.whole("session.clip_grad_norm_()")
        if self._divided is not None:
            self._divided.meet("a norm of gradients")
        with self._opened():
            return self.replica.clip_norm(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def backward(self, total: Tensor, weight: Tensor | float) -> float:
        """``total`` is the sum of this worker's losses, of which ``weight`` is the number (or the sum of weights): backward of the
        mean over all workers of the scope. Returns that mean."""
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise TaskError("session.backward(total, weight): total must be a tensor of one element, the sum of the losses")
        sums = self._wait(self.scope.sum_numbers(float(total.detach()), float(weight)), "the sum of weights")
        if not sums[1] > 0:
            raise TaskError(f"session.backward(total, weight): the weights of all workers add up to {sums[1]:g}")
        share = self._weight(any_share=True)  # divided out, because the gradient is multiplied by it later
        if self._divided is not None:  # workers with the same samples have all been counted
            share = self._divided.weight
            sums = [each / self._divided.rows for each in sums]
        with self._losses.weighted_by_the_user():
            (total * (self.scope.groups / sums[1] / share if share else 0.0)).backward()  # type: ignore[no-untyped-call]
        return float(sums[0] / sums[1])

    # Hooks, for the gradients of a backward and for its end.

    def _hook(self) -> None:
        replica = self.replica
        forward = replica.model.register_forward_pre_hook(OwnHook(self._before_forward), prepend=True)
        self._undo.append(forward.remove)
        self._adopt()
        if not self.scope.alone:
            self._undo += self._optimizers.attach()
        # Workers of one column have the same samples, and its loss.
        if not self.scope.alone and (self._divided is None or self._divided.rows < self.scope.group.size):
            self._undo += self._losses.attach()
        for name, parameter in replica.named.items():
            hook = parameter.register_hook(OwnHook(partial(self._arriving, name, parameter)))  # type: ignore[no-untyped-call]
            self._undo.append(hook.remove)

    def _is_the_scripts(self) -> bool:
        """Whether what this thread does is the script's, and no comparison of its model with the ordinary one."""
        return self._is_own_thread() and (self._divided is None or not self._divided.inside)

    def _batches(self) -> Batches:
        workers = self.scope.group.size // self.scope.groups
        if self._divided is not None:
            return Batches(*self._divided.samples, workers // self._divided.rows, self.scope.groups, divided=True)
        own, of_group = self._share() or (None, None)
        return Batches(own, of_group, workers, self.scope.groups)

    def _remark_soon(self, text: str) -> None:
        self._bridge.loop.call_soon_threadsafe(self._remark, text)

    def _remark(self, text: str) -> None:
        """Warn once of something that need not be wrong. On the loop's thread."""
        if text not in self._remarks:
            self._remarks.add(text)
            if self.scope.group.rank == 0:
                self._warn(text)

    def require_steps(self) -> None:
        """Raise `TaskError` if the loop trains without ``optimizer.step()``."""
        changed = sum(parameter._version for parameter in self.replica.parameters) != self._version
        if self.step == self.first_step and self._backwards and changed and not self._stopped:
            raise TaskError(
                "the loop changes the model's parameters after backward(), but never calls optimizer.step(), so the workers do not "
                "know of its steps: no model is left, and groups do not exchange theirs. Make the change in the step() of an "
                "optimizer, a subclass of torch.optim.Optimizer, and give that one to session.replicate()"
            )

    def _of_others(self) -> tuple[float, float]:
        """Sum and norm of what other optimizers train; in one step also of other parameters that losses depend on, which may be
        trained by hand. (Those of a divided model cannot be, and workers have parts of them.)"""
        tensors = self._optimizers.lasting()
        if self.step == self.first_step + LOSSES_TRIED:
            foreign = self._losses.take_foreign_parameters()
            tensors += [parameter.detach() for parameter in foreign if not isinstance(parameter, PartParameter)]
        return sum_and_norm(tensors) if tensors else (0.0, 0.0)

    def _is_own_thread(self) -> bool:
        # A loop that calls the model's layers, and never the model, is known by the thread in which it uses the session.
        return threading.get_ident() in (self._thread, self._bridge.caller)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        self._bridge.check_thread("the forward of a replicated model")
        self._thread = threading.get_ident()
        self._adopt()
        self._entering()
        if not self._overlapped.leaving:
            self.replica.begin_step(self.step)

    def _entering(self) -> None:
        """A forward of the model, or of one of its layers, begins; perhaps a backward's, which computes something again."""
        if self._in_backward:
            return
        self._overlapped.entering()
        self._asked |= self._backwards > 0

    def _adopt(self) -> None:
        """Let the user's hooks on parameters see whole gradients, as in one process."""
        if self._whole.adopt_hooks():
            self._asked = True
            if not self.held:
                raise TaskError(f"a hook on a parameter (register_hook) would see only this worker's part of its gradient: {HOLD}")

    def _arriving(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Autograd is about to add ``gradient`` to the parameter's."""
        if gradient.layout is not torch.strided:
            raise TaskError(f"the gradient of {name!r} is sparse, which cannot be summed over workers: use Embedding(sparse=False)")
        if parameter.shape != self._views[name].shape:
            raise TaskError(
                f"the parameter {name!r} has the shape {tuple(parameter.shape)} now, but had {tuple(self._views[name].shape)} at "
                "session.replicate(): change sizes (resize_token_embeddings()) before session.replicate()"
            )
        if parameter.dtype != self._views[name].dtype:
            raise TaskError(
                f"the parameter {name!r} is {parameter.dtype} now, but was {self._views[name].dtype} at session.replicate(): "
                "change the model's type (model.half(), model.bfloat16(), model.double()) before session.replicate(), or compute "
                "in another type by torch.autocast"
            )
        if gradient.requires_grad and not self.scope.alone:
            self._remark_soon(OWN_GRADIENTS)
        if not self._in_backward:
            if self._stopped:
                self._stop()
            check_hooks(self.replica.named.items(), own=1)
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._backward_ended)
            self._settings = checksum(settings_of(self.replica.optimizer))
            if not self.held:
                weight, exchanges = self._weight(), self.exchange.exchanges(self.step)
                self._overlapped.begin_backward(Step(weight, self._losses.only_adding, exchanges))
                # Now, because servers may answer with the next parameters while backward is running.
                self._guards.check(sampled=True)
                self._weights = self._sample()
            elif not self._decided and not self._backwards:
                self._asked |= any(map(_is_nonzero, self.replica.parameters))
        if self.held:
            self._whole.arriving(name, parameter)
        else:
            self._overlapped.arriving(name, parameter)

    def _sample(self) -> tuple[float, float]:
        return (0.0, 0.0) if self.scope.alone else sum_and_norm([self.replica.memory.sample_parameters(without=self._in_parts)])

    def _backward_ended(self) -> None:
        with self._opened():
            self._end_backward()

    def _end_backward(self) -> None:
        self._made += 1
        self._in_backward = False
        if self.held:
            self._backwards += not self._losses.only_adding
            if self._backwards == BACKWARDS_WITHOUT_STEP:
                self.require_steps()
            self._whole.end_backward(self._weight(), only_adding=self._losses.only_adding)
        else:
            self._overlapped.end_backward()

    # The optimizer. It keeps its class and its identity, so that schedules, and code that inspects it, continue to work.

    def _patch(self, optimizer: Optimizer) -> None:
        step_before, zero_before = optimizer.step, optimizer.zero_grad
        own: dict[str, Any] = {
            name: vars(optimizer)[name] for name in ("step", "zero_grad") if name in vars(optimizer)
        }  # a schedule wraps step

        @wraps(step_before)
        def step(self_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if self.is_updating:
                return None if self._updated else step_before()
            if self._divided is not None and not self._stopped:
                self._divided.meet("optimizer.step()", [self.step])
            self_._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedules look at it
            if closure is not None:
                return self._step_with(closure, step_before)
            with self._opened():
                self.end_step()
            return None

        @wraps(zero_before)
        def zero_grad(self_: Optimizer, set_to_none: bool = True) -> None:
            with self._opened():
                if self.held:
                    self._whole.drop()
                    zero_before(set_to_none)
                else:
                    self._overlapped.zero(set_to_none)

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]

        def restore() -> None:
            del optimizer.step, optimizer.zero_grad
            vars(optimizer).update(own)

        self._undo.append(restore)

    def end_step(self) -> None:
        """``optimizer.step()``. Raises the error of the exchange, and `RunStopped` after the last step of a run that must stop."""
        replica = self.replica
        if self._stopped:
            self._stop()
        self._guards.check(sampled=self.held)
        state = StepState(self.step, settings=checksum(settings_of(replica.optimizer)), tolerance=self._tolerance)
        state.others = self._of_others()
        state.constants, state.loss = self._losses.take_constants(), self._losses.take_value()
        own = self._end_held(state) if self.held else self._end_overlapped(state)
        exposed_s = replica.waited_s
        waited = self._bridge.loop.time()
        self.is_updating = True
        try:
            hold = self._wait(self._exchange(state), "optimizer.step()")
        finally:
            self.is_updating = False
        self._overlapped.ended()
        if self._returns:
            replica.take_all()
        now = self._bridge.loop.time()
        self._bridge.loop.call_soon_threadsafe(self._ended, self.step, self._made, now - self._began_s, exposed_s + now - waited)
        self._made = 0
        self._began_s = now
        self.step += 1
        self._backwards = 0
        for name, gradient in own.items():
            replica.named[name].grad = gradient
        if not self._decided:
            self._watch_on(hold)
        self._guards.passed(sampled=self._returns, keep=self.held)
        self._call_back()
        if self._stopped:
            self._stop()

    def _end_held(self, state: StepState) -> dict[str, Tensor | None]:
        """Pass the values of ``grad`` to the exchange. Returns the step's state."""
        replica, scope = self.replica, self.scope
        if self._whole.unsummed:
            raise TaskError("optimizer.step(): the last backward() of a step must be outside of accumulating()")
        own = {name: parameter.grad for name, parameter in replica.named.items()}
        gradients = {name: plain(gradient) for name, gradient in own.items() if gradient is not None}
        if not gradients and not self._updated:
            raise TaskError("optimizer.step() without a forward and a backward of the replicated model before it")
        if self._served and getattr(replica.optimizer, "grad_scale", None) is not None:
            raise TaskError(
                "model servers run the optimizer, so it cannot unscale gradients: call scaler.unscale_(optimizer) before "
                "scaler.step(optimizer)"
            )
        replica.without, replica.zeros_count = frozenset(own.keys() - gradients.keys()), True
        self._guards.check_there(replica.without)
        self._guards.check_unused(replica.without)
        # All workers have the same gradient, and the exchange sums over a group: so each contributes a part of it.
        replica.divisor = scope.group.size / scope.groups if self._divided is None else 1.0
        each = [scope.groups / bucket.sharers(scope.group).size for bucket in replica.buckets]
        replica.memory.fill_gradients(gradients, 1.0 if self._divided is None else each)
        state.weights = self._sample()
        if not scope.alone:
            state.without = checksum(sorted(replica.without - self._names_in_parts))
            alike = [gradient for name, gradient in gradients.items() if name not in self._names_in_parts]
            state.gradients = sum_and_norm(alike) if alike else (0.0, 0.0)
        if not self._decided:
            watch = self._whole.watch
            used = watch is not None and watch.used
            replaced = any(gradient is not None and not isinstance(gradient, WatchedGradient) for gradient in own.values())
            changed = self._served and state.settings != self._settings
            self._asked |= used or replaced or changed or self._backwards != 1 or self._whole.incomplete
            state.holds = self._asked
        for name, view in self._views.items():
            replica.named[name].grad = view.detach()
        replica.begin_backward(last=True)
        replica.end_backward()
        return own

    def _end_overlapped(self, state: StepState) -> dict[str, Tensor | None]:
        self._overlapped.end(
            exchanges=self.exchange.exchanges(self.step),
            there=self._guards.check_there,
            same_settings=not self._served or state.settings == self._settings,
        )
        state.weights = self._weights
        return {}

    def _step_with(self, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        """``optimizer.step(closure)``: each evaluation returns the loss and gradients over all workers, so that all of them take
        the same step."""
        if self._served:
            raise TaskError(f"model servers run the optimizer, so optimizer.step(closure) is not possible: use {LOCAL}")
        if self._divided is not None:
            raise TaskError("optimizer.step(closure) is not possible with a model that [compute] grid divides: remove grid")
        if self.replica.settings.clip_norm:
            raise TaskError(
                "optimizer.step(closure) with [optimizer] clip_norm: clip in the closure with "
                "session.clip_grad_norm_(), and remove clip_norm"
            )
        self.whole("optimizer.step(closure)")

        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            if self.scope.alone:
                return loss
            value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
            part = value * self._weight() / self.scope.groups
            (total,) = self._wait(self.scope.sum_numbers(part), "the sum of losses")
            return torch.full_like(loss, total) if isinstance(loss, Tensor) else total

        result = step(evaluate)
        self._updated = True
        try:
            self.end_step()
        finally:
            self._updated = False
        return result

    # The choice between held and overlapped gradients.

    def _wait_for_sum(self, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:  # nothing is left over if the loop ends before it comes to this
            await self.others.wait("sums", self.scope.sums, begin())

        self._wait(whole(), "the sum of gradients")

    def _hold(self, held: bool) -> None:
        self.held = self.replica.holding = held

    def _watch_on(self, hold: bool) -> None:
        """A watched step is over. ``hold``: the loop needs held gradients."""
        self._whole.unwatch()
        if hold or self.step >= self._watched_until:
            self._decided = True
            self._hold(hold)
        else:
            self._whole.watch = Watch()

    # On the loop's thread.

    def _bucket_ready(self, bucket: Bucket) -> None:
        self._begin()
        self.exchange.bucket_ready(bucket)

    def _begin(self) -> None:
        if self._begun != self.step:
            self._begun = self.step
            self.exchange.begin_step(self.step)

    async def _exchange(self, state: StepState) -> bool:
        """Exchange the step's state. Returns whether gradients are held from now on."""
        self._begin()
        hold = [state.holds]

        async def agree() -> None:
            agreed = await self.scope.agree(state)
            hold[0] = agreed.holds
            if agreed.remark:
                self._remark(agreed.remark)
            if agreed.same_loss and self._share() is None and self._divided is None:
                self._same_losses.add(state.loss)
                if len(self._same_losses) >= LOSSES_TRIED:
                    self._remark(SAME_SAMPLES)

        async def both() -> None:
            await together(self.exchange.end_step(), agree())
            if self.step == self.first_step + LOSSES_TRIED and self._divided is None:
                await self._compare_buffers()

        await self.others.wait("steps", self.step, both())
        self._stopped = await self._stops(self.step + 1)
        return hold[0]

    async def _compare_buffers(self) -> None:
        """Warn of buffers that workers have differently."""
        group, buffers = self.scope.group, own_buffers(self.replica.model)
        if self.scope.alone or not buffers:
            return
        names = await differing_buffers(buffers, group, "session/buffers")
        if names and group.rank == 0:
            self._warn(buffers_warning(names))


def _is_nonzero(parameter: nn.Parameter) -> bool:
    """Whether the parameter has a gradient other than zero, of an earlier backward outside of accumulating()."""
    gradient = parameter.grad
    return gradient is not None and not isinstance(gradient, PartGradient) and bool(plain(gradient).any())
