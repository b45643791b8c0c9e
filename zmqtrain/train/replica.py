"""A worker's copy of a torch model in flat buckets, as exchanges see it.

Parameters and gradients move into one run of memory a bucket; the model's own tensors become views of it. A step, seen from here::

    begin_step()                                   (compute thread)
    forward: each layer takes its buckets          waits where a gate is closed
    begin_backward(last=True); loss.backward()     complete buckets are handed over, in order, as backward goes on
    end_backward()                                 those with unused parameters follow

A bucket is handed over only after all buckets before it, so every worker of a group hands over in the same order. The local
optimizer runs on all parameters at once (`TorchReplica.update`), or bucket by bucket in the compute thread: before the bucket is
handed over, or when it is taken back (`optimize`).

An unused parameter has a gradient of zeros that says so (`zmqtrain.exchange.unreached`). Where the sum says it, too, no worker had
one, and the optimizer passes over the parameter, as torch's alone would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.errors import CheckpointError, TaskError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.base import Bucket, Optimize, OptimizerSpec, Sharing
from zmqtrain.exchange.optimizer import describe_optimizer
from zmqtrain.exchange.unreached import fill_unreached
from zmqtrain.parallel.shard import Shard
from zmqtrain.train.bucket_optimizers import BucketOptimizers
from zmqtrain.train.buckets import ParameterInfo, plan_buckets
from zmqtrain.train.device.base import Device
from zmqtrain.train.gates import Gate, Gates
from zmqtrain.train.held_bucket import HeldBucket, hold, views_of
from zmqtrain.train.layers import Layers
from zmqtrain.train.linear import SMALLEST_BYTES, write_gradients_to
from zmqtrain.train.loss_scale import LossScale
from zmqtrain.train.rows import rows_of, rows_of_bucket
from zmqtrain.train.shared import Allocate, allocate_privately
from zmqtrain.train.task import user_code
from zmqtrain.wire.tensor import TensorPayload


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How a replica cuts, clips and waits."""

    bucket_bytes: int = 4 << 20
    clip_norm: float = 0.0
    """Largest norm of all gradients together for the local update; 0 for no clipping."""
    overlap: bool = True
    """Whether buckets are handed over during backward; otherwise all of them at its end."""
    gate_timeout_s: float = 60.0
    """How long a layer waits for its parameters."""


class TorchReplica:
    """Implements `zmqtrain.exchange.base.Replica` for a torch model and optimizer.

    Takes over the parameters' memory at once. Needs no more memory than the gradients, plus one bucket
    while it is made.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: Device,
        settings: ReplicaSettings = ReplicaSettings(),
        *,
        recorder: Recorder | None = None,
        allocate: Allocate = allocate_privately,
        shards: Mapping[str, Shard] | None = None,
    ) -> None:
        """``shards``: which part of each parameter the model has, where it is divided within the group."""
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self._device = device
        self._recorder: Recorder = recorder or NullRecorder()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}  # shared ones come once
        group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        named = {name: p for name, p in named.items() if id(p) in group_of}
        if not named:
            raise TaskError("the optimizer has none of the model's trainable parameters: pass it model.parameters()")
        infos = [
            ParameterInfo(
                name, p.numel(), p.element_size(), str(p.dtype).removeprefix("torch."), group_of[id(p)], *rows_of(name, shards)
            )
            for name, p in named.items()
        ]
        self._named = named
        self.parameters = list(named.values())
        self._held = [hold(plan, named, device, allocate) for plan in plan_buckets(infos, settings.bucket_bytes)]
        self._buckets = tuple(
            Bucket(
                index,
                TensorPayload.of(h.host_parameters),
                TensorPayload.of(h.host_gradients),
                h.plan.group,
                h.plan.names,
                rows_of_bucket(h.plan.names, shards),
                h.parts.starts,
            )
            for index, h in enumerate(self._held)
        )
        self.gates = Gates(len(self._held), settings.gate_timeout_s, condition=device.condition(), clock=device.clock)
        places = {}
        self._undo: list[Callable[[], None]] = []
        for index, held in enumerate(self._held):
            for place, name in enumerate(held.plan.names):
                if held.views[place].nbytes >= SMALLEST_BYTES:
                    places[id(named[name])] = (index, place)
                hook = named[name].register_post_accumulate_grad_hook(partial(self._accumulated, index, place))  # type: ignore[no-untyped-call]
                self._undo.append(hook.remove)
        self._undo += [
            write_gradients_to(module, partial(self._memory_for, *places[id(module.weight)]))
            for module in model.modules()
            if type(module) is nn.Linear and id(module.weight) in places
        ]
        bucket_of = {id(named[name]): index for index, held in enumerate(self._held) for name in held.plan.names}
        self._layers = Layers(model, bucket_of, self._take)
        self._undo.append(self._layers.remove)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_ready: Callable[[Bucket], None] | None = None
        self._step = 0
        self._last = False  # whether the backward that runs is the step's last
        self._next = 0  # the bucket to hand over next
        self._handed_over: set[int] = set()  # buckets, since they were taken last
        self._backward_s = 0.0  # when backward began with that bucket
        self._when = Optimize.APART
        self._optimizers: BucketOptimizers | None = None
        self._sharing: Sharing | None = None
        self._added_before: dict[str, Tensor] = {}
        self._also_abort: list[Callable[[BaseException], None]] = []
        self.divisor = 1.0
        """By what gradients are divided when they are handed over."""
        self.loss_scale: LossScale | None = None
        """Where losses are scaled so that it depends on gradients: who judges them, and passes over updates by bad ones."""
        self.holding = False
        """Gradients are the caller's own tensors, which he copies into the buckets (`fill_gradients`) before they are handed over;
        backward leaves the buckets alone."""
        self.clears = True
        """Whether a bucket's gradients are forgotten when it is taken back; otherwise the caller sees to that."""
        self.without: frozenset[str] = frozenset()
        """Parameters that the next local update passes over: they have no gradient."""
        self.unreached: tuple[str, ...] = ()
        """Parameters that no backward of the last step has reached."""
        self.zeros_count = False
        """Such parameters have a gradient of zeros all the same, as in a loop that sets gradients to zero, not to None."""
        self.sound: Callable[..., bool] = _always
        """Whether what the step has computed may be used, as `zmqtrain.train.losses.StepLosses.sound` says."""
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """What is entered while the compute thread waits for parameters."""
        self.waited_s = 0.0
        """Seconds that this step's forward and backward waited for parameters: exposed communication."""
        self.update_s = 0.0
        """Seconds that all local updates took."""

    # The loop's side.

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def hyperparameters(self) -> OptimizerSpec:
        return describe_optimizer(self.optimizer)

    def connect(self, on_ready: Callable[[Bucket], None]) -> None:
        """Hand buckets over by ``on_ready(bucket)`` on the running loop: an exchange's ``bucket_ready``."""
        self._loop = asyncio.get_running_loop()
        self._on_ready = on_ready

    def optimize(self, when: Optimize) -> None:
        self._when = when
        if when is not Optimize.APART:
            self._optimizers = BucketOptimizers(
                self.optimizer, [[self._named[name] for name in held.plan.names] for held in self._held]
            )

    def share(self, sharing: Sharing) -> None:
        self._sharing = sharing
        for held, sums in zip(self._held, sharing.sums, strict=True):
            assert isinstance(sums, TensorPayload)
            held.host_sums = sums.tensor
            if self._device.staging is None:
                held.sums = views_of(held.plan, sums.tensor, self._named)
            else:
                self._device.staging.pin(sums.tensor)

    def parameters_ready(self, bucket: Bucket) -> None:
        held, staging = self._held[bucket.index], self._device.staging
        if staging is not None:  # it is copied while backward goes on with other buckets
            if held.due:
                held.arrive = staging.to_device(held.host_sums, held.gradients, partial(self._read, bucket.index))
            else:
                held.arrive = staging.to_device(held.host_parameters, held.parameters, _nothing)
        self.gates.arrive(bucket.index)

    def judged(self, finite: bool, step: int) -> bool:
        """Whether the gradient of ``step``, that of all who update together, is finite. Returns it."""
        if self.loss_scale is not None and self.loss_scale.judged(finite):
            scale, passed_over = self.loss_scale.value, self.loss_scale.passed_over
            self._recorder.event("loss scale", step=step, scale=scale, passed_over=passed_over)
        return finite

    async def update(self, *, gradient_scale: float = 1.0, clip: bool = True, hold: bool = False) -> None:
        """Afterwards all buckets are the compute thread's again, unless ``hold`` leaves that to `parameters_ready`."""
        await self._device.run(lambda: self._timed_update(gradient_scale, clip))
        if not hold:
            for index in range(len(self._held)):
                self.gates.arrive(index)

    def also_abort(self, abort: Callable[[BaseException], None]) -> None:
        """Call ``abort(error)`` whenever the replica is aborted: something else that the compute thread waits for."""
        self._also_abort.append(abort)

    def abort(self, error: BaseException) -> None:
        """Every wait for parameters, now and later, raises ``error`` in the compute thread."""
        self.gates.abort(error)
        for abort in self._also_abort:
            abort(error)

    def release(self) -> None:
        """The model is nobody's but the caller's again."""
        while self._undo:
            self._undo.pop()()

    # The compute thread's side.

    def begin_step(self, step: int) -> None:
        """A forward of this step begins next."""
        self._step, self.waited_s = step, 0.0
        self._layers.begin_forward()

    def begin_backward(self, *, last: bool) -> None:
        """A backward begins next. ``last``: no other micro-batch of this step follows, so complete buckets are handed over.

        Takes the buckets that no layer has asked for.
        """
        self._layers.end_forward()
        for index in range(len(self._held)):
            self._take(index)
        if self._sharing is not None:
            with self._recorder.span("wait until sums are read", "wait", step=self._step):
                start = self._device.clock()
                self._sharing.wait_writable()
                self.waited_s += self._device.clock() - start
        if self._added_before:
            self._go_on_adding()
        self._last, self._next, self._backward_s = last, 0, self._device.clock()
        for held in self._held:
            held.missing = set(range(len(held.views)))
            held.unreached = []

    def end_backward(self) -> None:
        """The backward has ended. After the last one all buckets are handed over."""
        if self._last:
            for held in self._held:
                held.unreached = [place for place in sorted(held.missing) if self._restart(held, place)]
            self.unreached = tuple(held.plan.names[place] for held in self._held for place in held.unreached)
            self._hand_over(len(self._held))
            self._last = False

    def take_back(self) -> None:
        """What the step has computed is not sound, so nothing of it was handed over: the parameters are as they were before it."""
        self._last = False
        for index, held in enumerate(self._held):
            self.gates.arrive(index)
            held.due = False

    def take_all(self) -> None:
        """Wait until the parameters of all buckets are there, what is due to them is done, and the network sees them."""
        for index in range(len(self._held)):
            self._take(index)
        if self._when is Optimize.AFTER and self._sharing is not None:
            self.publish()
        elif self._device.staging is not None:
            self._device.staging.synchronize()  # they may still be on their way to the host

    def take_copies(self) -> None:
        """What was given back so far is in the model's memory, also in a run that has been halted, where `take_all` only raises."""
        for held in self._held:
            if held.arrive is not None:
                held.arrive()
                held.arrive = None
        if self._device.staging is not None:
            self._device.staging.synchronize()

    def added_up(self) -> dict[str, Tensor]:
        """The gradients of steps since the last exchange, by parameter: none right after one. `take_all` comes first. They are the
        replica's own memory."""
        return {name: parameter.grad for name, parameter in self._named.items() if parameter.grad is not None}

    def go_on_adding_to(self, gradients: Mapping[str, Tensor]) -> None:
        """The next backward adds to what `added_up` gave in the run that this one resumes. Raises `CheckpointError`."""
        for name, gradient in gradients.items():
            parameter = self._named.get(name)
            if parameter is None or parameter.shape != gradient.shape or parameter.dtype != gradient.dtype:
                own = "none" if parameter is None else f"{parameter.dtype} {list(parameter.shape)}"
                raise CheckpointError(
                    f"the checkpoint has a gradient of {name}, {gradient.dtype} {list(gradient.shape)}, but here it is {own}: "
                    "resume with the model and the grid that it was made with"
                )
        self._added_before = dict(gradients)

    def _go_on_adding(self) -> None:
        for held in self._held:
            for name, view in zip(held.plan.names, held.views, strict=True):
                if name in self._added_before:
                    with torch.no_grad():
                        view.copy_(self._added_before[name])
                    self._named[name].grad = view
        self._added_before.clear()

    def publish(self) -> None:
        """The model's parameters were changed from outside (restored): let the network see them, too."""
        staging = self._device.staging
        if staging is None:
            return
        for held in self._held:
            staging.to_host(held.parameters, held.host_parameters, _nothing)
        staging.synchronize()

    # For a caller who sees to gradients himself, in the compute thread.

    @property
    def named(self) -> Mapping[str, nn.Parameter]:
        """The parameters by name, in the model's order."""
        return self._named

    def gradient_views(self) -> dict[str, Tensor]:
        """Where the gradient of each parameter lies in its bucket."""
        return {name: view for held in self._held for name, view in zip(held.plan.names, held.views, strict=True)}

    def missing(self) -> list[str]:
        """Parameters that no backward of this step has reached."""
        return [name for held in self._held for place in held.missing if self._named[name := held.plan.names[place]].grad is None]

    def fill_gradients(self, gradients: Mapping[str, Tensor], factor: float = 1.0) -> None:
        """Copy gradients, times ``factor``, to where the network sees them; zeros where there are none."""
        staging = self._device.staging
        for held in self._held:
            for name, view in zip(held.plan.names, held.views, strict=True):
                gradient = gradients.get(name)
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient)
            if factor != 1.0:
                held.gradients.mul_(factor)
            if staging is not None:
                staging.to_host(held.gradients, held.host_gradients, _nothing)
        if staging is not None:
            staging.synchronize()

    def fetch_gradients(self, factor: float = 1.0) -> None:
        """The network has changed the gradients: have them, times ``factor``, in `gradient_views`."""
        for held in self._held:
            if self._device.staging is not None:
                self._device.staging.to_device(held.host_gradients, held.gradients, _nothing)()
            if factor != 1.0:
                held.gradients.mul_(factor)

    def bind(self) -> list[str]:
        """Let parameters whose ``data`` was replaced be part of their buckets again, with the new content. Returns their names."""
        replaced = []
        for held in self._held:
            for name, view in zip(held.plan.names, held.parameter_views, strict=True):
                parameter = self._named[name]
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter.data)
                    parameter.data = view
                    replaced.append(name)
        return replaced

    def sample_parameters(self, most: int = 64) -> Tensor:
        """A few elements of each bucket of parameters, the same ones each time."""
        return torch.cat([held.parameters[:: -(-held.parameters.numel() // most)].double() for held in self._held])

    def flat_parameters(self) -> list[Tensor]:
        """Each bucket's parameters, in one run of memory."""
        return [held.parameters for held in self._held]

    def _memory_for(self, index: int, place: int) -> Tensor | None:
        """Where backward may write the gradient of a parameter: its own place, for the first one since the bucket was taken."""
        held = self._held[index]
        if self.holding:
            return None
        if self._named[held.plan.names[place]].grad is not None or place in held.written:
            return None
        held.written.add(place)
        return held.views[place].detach()

    def _accumulated(self, index: int, place: int, parameter: Tensor) -> None:
        """Autograd has added to a gradient. In autograd's thread (CUDA) or the compute thread (CPU)."""
        if self.holding:
            return
        held = self._held[index]
        view, grad = held.views[place], parameter.grad
        if grad is not view:  # the first since the bucket was taken
            assert grad is not None
            if grad.layout != torch.strided:
                raise TaskError(
                    f"the parameter {held.plan.names[place]!r} got a sparse gradient, and gradients travel whole: "
                    "build its layer with sparse=False (nn.Embedding, nn.EmbeddingBag), and use an optimizer for dense gradients"
                )
            if grad.data_ptr() != view.data_ptr():
                view.copy_(grad)
            parameter.grad = view
        if not self._last:
            return
        if place not in held.missing:
            raise TaskError(
                f"the parameter {held.plan.names[place]!r} got its gradient twice in one backward, so its bucket was handed over "
                "too early; use torch.utils.checkpoint with use_reentrant=False"
            )
        held.missing.discard(place)
        if self.settings.overlap and index == self._next and not held.missing:
            stop = index + 1
            while stop < len(self._held) and not self._held[stop].missing:
                stop += 1
            self._hand_over(stop)

    def _restart(self, held: HeldBucket, place: int) -> bool:
        """A parameter that no backward of this step has reached gets a gradient that says so. Returns whether it is one."""
        parameter, view = self._named[held.plan.names[place]], held.views[place]
        if parameter.grad is not None:
            return False
        parameter.grad = view
        if self.zeros_count:
            view.zero_()
            return False
        fill_unreached(view)
        return True

    def _hand_over(self, stop: int) -> None:
        clock, sound = self._device.clock, self.sound
        if self._when is Optimize.BEFORE and not sound():
            return
        for index in range(self._next, stop):
            now = clock()
            self._recorder.add_span(f"backward of bucket {index}", "compute", self._backward_s, now, step=self._step)
            held = self._held[index]
            if self.divisor != 1.0:
                held.gradients.div_(self.divisor)
            travels = (held.gradients, held.host_gradients)
            if self._when is Optimize.BEFORE:
                self._update_bucket(index)
                travels = (held.parameters, held.host_parameters)
            elif self._when is Optimize.AFTER:
                assert self._optimizers is not None
                self._optimizers.prepare(index)  # a schedule may move on before the bucket is taken back
                held.due = True
            self._backward_s = clock()
            self._handed_over.add(index)
            self.gates.close(index)
            staging = self._device.staging
            if staging is None:
                self._from_compute(index)
            else:
                staging.to_host(*travels, partial(self._copied, index, sound))
        self._next = max(self._next, stop)

    def _copied(self, index: int, sound: Callable[..., bool]) -> None:
        """A bucket has arrived on the host, and with it the losses that were copied before it. In the staging's thread."""
        if sound(arrived=True):
            self._from_compute(index)

    def _from_compute(self, index: int) -> None:
        assert self._loop is not None, "connect() comes first"
        if self._when is not Optimize.BEFORE:
            held = self._held[index]
            held.parts.say_reached(held.host_gradients, held.unreached)
        if self._sharing is not None:
            self._sharing.produced(index)
        self._loop.call_soon_threadsafe(self._deliver, self._buckets[index])

    def _deliver(self, bucket: Bucket) -> None:
        assert self._on_ready is not None
        try:
            self._on_ready(bucket)
        except BaseException as error:
            self.abort(error)  # otherwise the compute thread would wait for the whole time-out
            raise

    def _take(self, index: int) -> None:
        """Own the bucket; wait for it if the exchange has it."""
        state = self.gates.state(index)
        if state is Gate.OPEN:
            return
        if state is Gate.CLOSED:
            with self._recorder.span(f"parameters of bucket {index}", "wait", step=self._step), self.waiting():
                self.waited_s += self.gates.take(index)
        else:
            self.waited_s += self.gates.take(index)
        held, staging = self._held[index], self._device.staging
        if held.arrive is not None:
            held.arrive()
            held.arrive = None
        if held.due:
            held.due = False
            self._update_bucket(index)
            if staging is not None and self._sharing is None:  # a peer may ask for the parameters at any time
                staging.to_host(held.parameters, held.host_parameters, _nothing)
        if index not in self._handed_over:  # somebody has only looked at the parameters: gradients are still being added up
            return
        self._handed_over.discard(index)
        held.written.clear()
        if self.clears:
            # Autograd then makes each gradient anew and `_accumulated` copies it: a copy costs less than zeroing and adding.
            for name in held.plan.names:
                self._named[name].grad = None

    def _update_bucket(self, index: int) -> None:
        assert self._optimizers is not None
        held = self._held[index]
        self._point_at_sums(held, held.unreached if self._when is Optimize.BEFORE else held.parts.unreached(held.host_sums))
        with self._recorder.span(f"update of bucket {index}", "compute", step=self._step), user_code("the optimizer's step()"):
            if self._when is Optimize.BEFORE:
                self._optimizers.prepare(index)
            self._optimizers.step(index)
        if self._device.staging is None:
            self._read(index)

    def _point_at_sums(self, held: HeldBucket, unreached: Sequence[int]) -> None:
        """The optimizer goes by the sums next, and passes over parameters that have none."""
        passed_over = set(unreached)
        for place, (name, view) in enumerate(zip(held.plan.names, held.sums, strict=True)):
            self._named[name].grad = None if place in passed_over or name in self.without else view

    def _read(self, index: int) -> None:
        """The sums of a bucket were read; with staging, in a thread of its own."""
        if self._sharing is not None:
            self._sharing.taken(index)

    def _finite(self) -> bool:
        """Of the gradients that an update goes by. One synchronization."""
        flats = [held.host_sums if self._device.staging is None else held.gradients for held in self._held]
        return bool(torch.stack([flat.sum(dtype=torch.float32) for flat in flats]).isfinite().all())

    def _timed_update(self, gradient_scale: float, clip: bool) -> None:
        start = self._device.clock()
        with self._recorder.span("update", "compute", step=self._step):
            self._update(gradient_scale, clip)
        self.update_s += self._device.clock() - start

    def _update(self, gradient_scale: float, clip: bool) -> None:
        staging = self._device.staging
        for index, held in enumerate(self._held):
            unreached = held.parts.unreached(held.host_sums)
            if staging is not None:
                staging.to_device(held.host_sums, held.gradients, partial(self._read, index))()
            if gradient_scale != 1.0:
                held.gradients.mul_(gradient_scale)
            self._point_at_sums(held, unreached)
        if self.loss_scale is None or self.judged(self._finite(), self._step):
            if clip and self.settings.clip_norm > 0:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_norm)
            with user_code("the optimizer's step()"):
                self.optimizer.step()
        if staging is None:
            for index in range(len(self._held)):
                self._read(index)
        self.publish()


def _nothing() -> None:
    """Nobody waits for the end of this copy."""


def _always(*, arrived: bool = False) -> bool:
    """Who computes has looked at the loss before."""
    return True
