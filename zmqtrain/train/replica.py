"""A worker's copy of a torch model in flat buckets, as exchanges see it.

Each bucket is one contiguous range of memory for parameters and one for gradients; the model's own tensors become views of it. A
step, seen from here::

    begin_step()                                   (compute thread)
    forward: each layer takes its buckets          waits where a gate is closed
    begin_backward(last=True); loss.backward()     complete buckets are handed over, in order, as backward goes on
    end_backward()                                 those with unused parameters follow

`zmqtrain.train.bucket_machine` decides when a bucket is handed over, and what happens to it before that and when it is taken back;
this module carries it out. The local optimizer runs on all parameters at once (`TorchReplica.update`), or bucket by bucket in the
compute thread: before the bucket is handed over, or when it is taken back (`optimize`).

An unused parameter has a gradient of negative zeros as a mark (`zmqtrain.collectives.unreached`). If the sum has that mark, too, no
worker had a gradient, and the optimizer skips the parameter, as it does in PyTorch alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.collectives.unreached import fill_unreached
from zmqtrain.errors import TaskError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.base import Bucket, Optimize, OptimizerSpec, Sharing
from zmqtrain.exchange.optimizer import describe_optimizer, is_torchs_own
from zmqtrain.parallel.gradient_norm import GradientNorm
from zmqtrain.parallel.placed.model import ParallelModel
from zmqtrain.parallel.shard import Shard
from zmqtrain.topology.bucket_limit import USUAL_BYTES, BucketLimit
from zmqtrain.train.bucket_machine import BucketMachine, Do, State
from zmqtrain.train.bucket_optimizers import BucketOptimizers
from zmqtrain.train.buckets import ParameterInfo, plan_buckets
from zmqtrain.train.device.base import Device
from zmqtrain.train.gates import Gates
from zmqtrain.train.layers import Layers
from zmqtrain.train.linear import SMALLEST_BYTES, write_gradients_to
from zmqtrain.train.loss_scale import LossScale
from zmqtrain.train.optimizer_state import load_optimizer_state, optimizer_state
from zmqtrain.train.random_state import drawn_alike
from zmqtrain.train.replica_memory import HeldBucket, ReplicaMemory, nothing, views_of
from zmqtrain.train.resized_rate import multiplied
from zmqtrain.train.rows import rows_of, rows_of_bucket
from zmqtrain.train.shared import Allocate, allocate_privately
from zmqtrain.train.task import user_code
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How a replica divides parameters into buckets, clips gradients and waits."""

    bucket_bytes: int | BucketLimit = USUAL_BYTES
    clip_norm: float = 0.0
    """The largest norm of all gradients together for the local update; 0: no clipping."""
    overlap: bool = True
    """Whether buckets are handed over during backward; otherwise all are handed over at its end."""
    gate_timeout_s: float = 60.0
    """How long a layer waits for its parameters."""


class TorchReplica:
    """Implements `zmqtrain.exchange.base.Replica` for a torch model and optimizer.

    Takes over the parameters' memory at once. The additional memory is that of the gradients, and that of one bucket while it is
    made.
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
        norm: GradientNorm | None = None,
    ) -> None:
        """``shards``: the part of each parameter that the model has, if it is divided within the group; ``norm``: of the whole
        gradient then."""
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self._device, self._norm = device, norm
        self._recorder: Recorder = recorder or NullRecorder()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}  # lists a shared one once
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
        self.named: Mapping[str, nn.Parameter] = named
        """The parameters by name, in the model's order."""
        self.parameters = list(named.values())
        self.memory = ReplicaMemory(plan_buckets(infos, settings.bucket_bytes), named, device, allocate)
        """Parameters and gradients in their buckets, for a caller that handles gradients itself, in the compute thread."""
        self._held = self.memory.buckets
        self._buckets = tuple(
            Bucket(
                index,
                TensorPayload.of(h.host_parameters),
                TensorPayload.of(h.host_gradients),
                h.plan.group,
                h.plan.names,
                rows_of_bucket(h.plan.names, shards),
                h.parts.starts,
                tuple(tuple(view.shape) for view in h.views),
            )
            for index, h in enumerate(self._held)
        )
        self._machine = BucketMachine([held.plan.names for held in self._held], overlap=settings.overlap)
        self._gates = Gates(self._machine, settings.gate_timeout_s, condition=device.condition(), clock=device.clock)
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
        self._layers = Layers(model, bucket_of, self._take_for_forward, overlap=settings.overlap)
        self._undo.append(self._layers.remove)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_ready: Callable[[Bucket], None] | None = None
        self._step = 0
        self._late: frozenset[int] = frozenset()  # buckets that no layer has taken in the forward
        self._backward_s = 0.0  # when backward began with the next bucket to be handed over
        self._optimizers: BucketOptimizers | None = None
        self._sharing: Sharing | None = None
        self._also_abort: list[Callable[[BaseException], None]] = []
        self._buffers_before: tuple[int, Mapping[str, Tensor]] = -1, {}  # the step before which the buffers were these
        self.divisor = 1.0
        """The divisor of gradients when they are handed over."""
        self.weight = 0.0
        """The weight of what has been added up to gradients since they were last handed over, if losses have weights."""
        self.loss_scale: LossScale | None = None
        self.rate = self.next_rate = 1.0
        """Factors for the learning rates in this step, and in the one that begins next."""
        """If losses are scaled depending on gradients: judges gradients, and skips updates by bad ones."""
        self.holding = False
        """Gradients are the caller's own tensors, which it copies into the buckets (`ReplicaMemory.fill_gradients`) before they are
        handed over; backward does not touch the buckets."""
        self.clears = True
        """Whether a bucket's gradients are discarded when it is taken back; otherwise the caller does that."""
        self.without: frozenset[str] = frozenset()
        """Parameters that the next local update skips, since they have no gradient."""
        self.unreached: tuple[str, ...] = ()
        """Parameters that no backward of the last step has reached."""
        self.zeros_count = False
        """Such parameters have a gradient of zeros, as in a loop that sets gradients to zero, not to None."""
        self.draws: tuple[int, ...] = ()
        """The seed of what the local optimizer draws in a step, together with the step's number: the same for all workers that have
        the same parameters."""
        self.sound: Callable[..., bool] = _always
        """Whether the step's results may be used; see `zmqtrain.train.losses.StepLosses.sound`."""
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """The context in which the compute thread waits for parameters."""
        self.entering: Callable[[], None] = nothing
        """Called before a forward takes a bucket."""
        self.waited_s = 0.0
        """Seconds for which this step's forward and backward have waited for parameters: exposed communication."""
        self._prepared = -1  # the newest step for whose update all is done that needs others
        self.updated = -1
        """The newest step with whose gradients all parameters were updated at once (`update`)."""
        self.update_s = 0.0
        """Seconds that all local updates have taken."""

    # The event loop's side.

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def hyperparameters(self) -> OptimizerSpec:
        return describe_optimizer(self.optimizer)

    def connect(self, on_ready: Callable[[Bucket], None]) -> None:
        """Hand buckets over by calling ``on_ready(bucket)``, an exchange's ``bucket_ready``, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._on_ready = on_ready

    def optimize(self, when: Optimize) -> None:
        self._machine.when = when
        if when is not Optimize.APART:
            self._optimizers = BucketOptimizers(
                self.optimizer, [[self.named[name] for name in held.plan.names] for held in self._held]
            )

    def share(self, sharing: Sharing) -> None:
        self._sharing = sharing
        for held, sums in zip(self._held, sharing.sums, strict=True):
            assert isinstance(sums, TensorPayload)
            held.host_sums = sums.tensor
            if self._device.staging is None:
                held.sums = views_of(held.plan, sums.tensor, self.named)
            else:
                self._device.staging.pin(sums.tensor)

    def parameters_ready(self, bucket: Bucket) -> None:
        held, staging = self._held[bucket.index], self._device.staging
        if staging is not None:  # copied while backward goes on with other buckets
            if self._machine.due(bucket.index):
                held.arrive = staging.to_device(held.host_sums, held.gradients, partial(self._read, bucket.index))
            else:
                held.arrive = staging.to_device(held.host_parameters, held.parameters, nothing)
        self._gates.answered(bucket.index)

    def judged(self, finite: bool, step: int) -> bool:
        """Record whether the gradient of ``step``, summed over all who update together, is finite. Returns ``finite``."""
        if self.loss_scale is not None and self.loss_scale.judged(finite):
            scale, passed_over = self.loss_scale.value, self.loss_scale.passed_over
            self._recorder.event("loss scale", step=step, scale=scale, passed_over=passed_over)
        return finite

    async def update(self, *, hold: bool = False) -> None:
        """Run the local update. Afterwards the compute thread owns all buckets again, unless ``hold`` leaves that to
        `parameters_ready`."""
        await self._device.run(self._timed_update)
        if not hold:
            self._gates.all_answered()

    async def beside(self) -> tuple[Mapping[str, Payload], Mapping[str, Value]]:
        tensors = await self._device.run(self._beside)
        return tensors, {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}

    async def take_beside(self, tensors: Mapping[str, Payload], values: Mapping[str, Value]) -> None:
        await self._device.run(partial(self._take_beside, tensors))
        if self.loss_scale is not None:
            self.loss_scale.load(values.get("loss_scale"))

    def also_abort(self, abort: Callable[[BaseException], None]) -> None:
        """Call ``abort(error)`` whenever the replica is aborted, to end another wait of the compute thread."""
        self._also_abort.append(abort)

    def abort(self, error: BaseException) -> None:
        """Every wait for parameters, now and later, raises ``error`` in the compute thread."""
        self._gates.abort(error)
        for abort in self._also_abort:
            abort(error)

    def release(self) -> None:
        """Detach the replica from the model, which then belongs to the caller alone."""
        while self._undo:
            self._undo.pop()()

    # The compute thread's side.

    def begin_step(self, step: int) -> None:
        """A forward of this step comes next. Raises `TaskError` if the model has been moved to other memory."""
        self.memory.require_in_place()
        self._step, self.waited_s, self.rate = step, 0.0, self.next_rate
        self._layers.begin_forward()

    def forward(self) -> AbstractContextManager[object]:
        """The context of a forward, which finds out when the model reads its parameters."""
        return self._layers.watching()

    def begin_backward(self, *, last: bool) -> None:
        """A backward comes next. ``last``: it is the step's last one, so complete buckets are handed over.

        Takes the buckets that no layer has asked for.
        """
        self._layers.end_forward()
        self._late = frozenset(index for index in range(len(self._held)) if self._machine.state(index) is not State.OPEN)
        for index in range(len(self._held)):
            self._take(index)
        if self._sharing is not None:
            with self._recorder.span("wait until sums are read", "wait", step=self._step):
                start = self._device.clock()
                self._sharing.wait_writable()
                self.waited_s += self._device.clock() - start
        self.memory.before_backward()
        self._backward_s = self._device.clock()
        self.unreached = ()
        self._machine.begin_backward(last=last)

    def end_backward(self) -> None:
        """The backward has ended. After the last one all buckets are handed over."""
        if self._machine.last:
            missing = self.missing()
            views = self.memory.gradient_views() if missing else {}
            for name in missing:
                self.named[name].grad = fill_unreached(views[name])
            if self.zeros_count:
                missing = []
            self.unreached = tuple(missing)
            self._machine.end_backward()
            self._hand_over()

    def take_back(self) -> None:
        """The step's results are not valid, and nothing of it was handed over: the parameters stay as they were before it."""
        self._machine.take_back()

    def take_all(self) -> None:
        """Wait until the parameters of all buckets have arrived, finish due updates, and make them visible to the network."""
        for index in range(len(self._held)):
            self._take(index)
        if self._machine.when is Optimize.AFTER and self._sharing is not None:
            self.memory.publish()
        else:
            self.memory.synchronize()  # copies to the host may still be running

    def take_copies(self) -> None:
        """Put everything returned so far into the model's memory. Works also in a halted run, in which `take_all` only raises."""
        for index in range(len(self._held)):
            self.memory.fetch(index)
        self.memory.synchronize()

    def untrained(self, *, buffers: bool) -> dict[str, Tensor]:
        """What of the model is in no bucket: parameters that are not trained, and its ``buffers``."""
        tensors = {f"frozen/{name}": each.detach() for name, each in self.model.named_parameters() if name not in self.named}
        return tensors | ({f"buffer/{name}": buffer for name, buffer in self.model.named_buffers()} if buffers else {})

    def begin_again(self, step: int) -> None:
        """If ``step`` was begun before, put the model's buffers back to what they were then. Otherwise remember them."""
        buffers = dict(self.model.named_buffers())
        before, kept = self._buffers_before
        with torch.no_grad():
            for name, buffer in buffers.items() if before == step else ():
                buffer.copy_(kept[name])
        if before != step:
            self._buffers_before = step, {name: buffer.detach().clone() for name, buffer in buffers.items()}

    def rest_at(self, step: int) -> None:
        """Training has broken off: become what the replica is after ``step``, whose gradients are summed, if it is not that
        already; nothing remains of a step that was begun after it."""
        if isinstance(self.model, ParallelModel):
            self.model.break_off()
        if self.updated < step == self._step:
            self._timed_update()
        before, _ = self._buffers_before
        if before > step:
            self.begin_again(before)

    def _beside(self) -> dict[str, Payload]:
        self.take_all()
        tensors = optimizer_state(self.model, self.optimizer) | self.untrained(buffers=True)
        return {name: TensorPayload.of(tensor.detach().cpu().clone().contiguous()) for name, tensor in tensors.items()}

    def _take_beside(self, received: Mapping[str, Payload]) -> None:
        tensors = {name: payload.tensor for name, payload in received.items() if isinstance(payload, TensorPayload)}
        with torch.no_grad():
            for name, tensor in self.untrained(buffers=True).items():
                tensor.copy_(tensors.pop(name))
        load_optimizer_state(self.model, self.optimizer, tensors)

    def missing(self) -> list[str]:
        """The names of the parameters that no backward of this step has reached."""
        return [
            name
            for index, held in enumerate(self._held)
            if (missing := self._machine.missing(index))
            for name in held.plan.names
            if name in missing and self.named[name].grad is None
        ]

    def _memory_for(self, index: int, place: int) -> Tensor | None:
        """Where backward may write the gradient of a parameter: its place in the bucket, for the first one since the bucket was
        taken."""
        held = self._held[index]
        if self.holding:
            return None
        if self.named[held.plan.names[place]].grad is not None or place in held.written:
            return None
        held.written.add(place)
        return held.views[place].detach()

    def _accumulated(self, index: int, place: int, parameter: Tensor) -> None:
        """Autograd has added to a gradient. Runs in autograd's thread (CUDA) or the compute thread (CPU)."""
        if self.holding:
            return
        held = self._held[index]
        if index in self._late:
            raise TaskError(
                f"the parameter {held.plan.names[place]!r} was used in a step that did not call its layer, although the first step "
                "did, so the forward may have read it before its update: let the model call the same layers in every step, or set "
                "[compute] overlap = false"
            )
        view, grad = held.views[place], parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise TaskError(
                f"the parameter {held.plan.names[place]!r} got a sparse gradient, but gradients are sent whole: "
                "build its layer with sparse=False (nn.Embedding, nn.EmbeddingBag), and use an optimizer for dense gradients"
            )
        if grad.data_ptr() != view.data_ptr():  # the first one since the bucket was taken, or its memory was replaced
            view.copy_(grad)
            parameter.grad = view.detach()
        try:
            complete = self._machine.gradient(index, held.plan.names[place])
        except ValueError:
            raise TaskError(
                f"the parameter {held.plan.names[place]!r} got its gradient twice in one backward, so its bucket was handed over "
                "too early; if the model uses torch.utils.checkpoint, pass use_reentrant=False"
            ) from None
        if complete:
            self._hand_over()

    def _hand_over(self) -> None:
        sound = self.sound
        if self._machine.when is Optimize.BEFORE and not sound():
            return
        for do, index in self._machine.hand_over():
            if do is Do.COMPLETE:
                self._complete(index)
            elif do is Do.NOTE:
                assert self._optimizers is not None
                self._optimizers.prepare(index, self.rate)
            elif do is Do.UPDATE:
                self._update_bucket(index)
            else:
                self._backward_s = self._device.clock()
                self._leave(index, sound)

    def _complete(self, index: int) -> None:
        """Backward has computed all gradients of a bucket."""
        now, held = self._device.clock(), self._held[index]
        self._recorder.add_span(f"backward of bucket {index}", "compute", self._backward_s, now, step=self._step)
        if self.divisor != 1.0:
            held.gradients.div_(self.divisor)

    def _leave(self, index: int, sound: Callable[..., bool]) -> None:
        held, staging = self._held[index], self._device.staging
        if staging is None:
            self._from_compute(index)
        elif self._machine.when is Optimize.BEFORE:
            staging.to_host(held.parameters, held.host_parameters, partial(self._copied, index, sound))
        else:
            staging.to_host(held.gradients, held.host_gradients, partial(self._copied, index, sound))

    def _copied(self, index: int, sound: Callable[..., bool]) -> None:
        """A bucket has arrived on the host, and so have the losses that were copied before it. Runs in the staging's thread."""
        if sound(arrived=True):
            self._from_compute(index)

    def _from_compute(self, index: int) -> None:
        assert self._loop is not None, "connect() comes first"
        if self._machine.when is not Optimize.BEFORE:
            held = self._held[index]
            held.parts.say_reached(held.host_gradients, self._unreached_in(held))
        if self._sharing is not None:
            self._sharing.produced(index)
        self._loop.call_soon_threadsafe(self._deliver, self._buckets[index])

    def _deliver(self, bucket: Bucket) -> None:
        assert self._on_ready is not None
        try:
            self._on_ready(bucket)
        except BaseException as error:
            self.abort(error)  # otherwise the compute thread would wait for the full time-out
            raise

    def _take_for_forward(self, index: int) -> None:
        self.entering()
        self._take(index)

    def _take(self, index: int) -> None:
        """Take the bucket; wait for it if the exchange has it."""
        state = self._machine.state(index)
        if state is State.OPEN:
            return
        with self._waiting(index) if state is State.CLOSED else nullcontext():
            todo, waited_s = self._gates.take(index)
        self.waited_s += waited_s
        held, staging = self._held[index], self._device.staging
        for do in todo:
            if do is Do.FETCH:
                self.memory.fetch(index)
            elif do is Do.UPDATE:
                self._update_bucket(index)
                if staging is not None and self._sharing is None:  # a peer may ask for the parameters at any time
                    staging.to_host(held.parameters, held.host_parameters, nothing)
            else:
                held.written.clear()
                if self.clears:
                    # Autograd then computes each gradient anew and `_accumulated` copies it: a copy costs less than zeroing and
                    # adding.
                    for name in held.plan.names:
                        self.named[name].grad = None

    @contextmanager
    def _waiting(self, index: int) -> Iterator[None]:
        with self._recorder.span(f"parameters of bucket {index}", "wait", step=self._step), self.waiting():
            yield

    def _update_bucket(self, index: int) -> None:
        assert self._optimizers is not None
        held = self._held[index]
        local = self._machine.when is Optimize.BEFORE
        self._point_at_sums(held, self._unreached_in(held) if local else held.parts.unreached(held.host_sums))
        with self._recorder.span(f"update of bucket {index}", "compute", step=self._step), user_code("the optimizer's step()"):
            self._optimizers.step(index)
        if self._device.staging is None:
            self._read(index)

    def _unreached_in(self, held: HeldBucket) -> list[int]:
        """The indices in the bucket of the parameters that this worker's step has not reached."""
        return [place for place, name in enumerate(held.plan.names) if name in self.unreached] if self.unreached else []

    def _point_at_sums(self, held: HeldBucket, unreached: Sequence[int]) -> None:
        """Point the optimizer to the sums; it will skip parameters that have none."""
        for place, (name, view) in enumerate(zip(held.plan.names, held.sums, strict=True)):
            self.named[name].grad = None if place in unreached or name in self.without else view.detach()

    def _read(self, index: int) -> None:
        """The sums of a bucket were read. With staging, this runs in a thread of its own."""
        if self._sharing is not None:
            self._sharing.taken(index)

    def clip_norm(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of the whole gradient. If the model is divided, all workers of the group call it.

        Returns the norm before. Raises `RuntimeError` if it is not finite, and ``error_if_nonfinite``."""
        if self._norm is None:
            return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm, norm_type, error_if_nonfinite)
        total = self._norm({name: parameter.grad for name, parameter in self.named.items()}, norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is not finite, so they cannot be clipped: pass "
                "error_if_nonfinite=False to scale them by it regardless"
            )
        torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, total)
        return total

    def _timed_update(self) -> None:
        start = self._device.clock()
        with self._recorder.span("update", "compute", step=self._step):
            self._update()
        self.update_s += self._device.clock() - start

    def prepare_update(self) -> None:
        """Do the part of the next `update` for which it needs others: gradients are clipped by the norm of the whole model."""
        self._take_sums()
        self.clip_norm(self.settings.clip_norm)
        self._prepared = self._step

    def _take_sums(self) -> None:
        staging = self._device.staging
        for index, held in enumerate(self._held):
            unreached = held.parts.unreached(held.host_sums)
            if staging is not None:
                staging.to_device(held.host_sums, held.gradients, partial(self._read, index))()
            self._point_at_sums(held, unreached)

    def _update(self) -> None:
        staging, prepared = self._device.staging, self._prepared == self._step
        if not prepared:
            self._take_sums()
        if self.loss_scale is None or self.judged(self.memory.finite(), self._step):
            if self.settings.clip_norm > 0 and not prepared:
                self.clip_norm(self.settings.clip_norm)
            own = nullcontext() if is_torchs_own(self.optimizer) else self._drawn_alike()
            with user_code("the optimizer's step()"), own, multiplied(self.optimizer, self.rate):
                self.optimizer.step()
        if staging is None:
            for index in range(len(self._held)):
                self._read(index)
        self.memory.publish()
        self.updated = self._step

    def _drawn_alike(self) -> AbstractContextManager[None]:
        return drawn_alike(self._device.torch_device, (*self.draws, self._step))


def _always(*, arrived: bool = False) -> bool:
    """Say that the loss is good, for a caller that has checked it."""
    return True
