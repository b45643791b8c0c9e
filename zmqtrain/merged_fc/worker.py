"""A worker whose fully connected layers are computed by the FC server: its own layers, its step and its evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from zmqtrain.data.batch import Batch
from zmqtrain.data.bridge import Begun
from zmqtrain.errors import UsageError
from zmqtrain.events import Recorder
from zmqtrain.exchange.members import Members
from zmqtrain.exchange.optimizer import describe_optimizer
from zmqtrain.exchange.server_messages import differing
from zmqtrain.membership.context import RoleContext
from zmqtrain.merged_fc.client import FcClient
from zmqtrain.merged_fc.link import FcLink
from zmqtrain.merged_fc.phases import build_phase
from zmqtrain.merged_fc.step import Hyperparameters, MergedStep
from zmqtrain.train.device.base import Device
from zmqtrain.train.evaluate import Evaluation, EvaluationSettings
from zmqtrain.train.metrics import Sums
from zmqtrain.train.remote_layers import OwnLayers
from zmqtrain.train.replica import TorchReplica
from zmqtrain.train.shares import in_step
from zmqtrain.train.slot import Slot
from zmqtrain.train.step import StepSettings
from zmqtrain.train.task import Task, user_code
from zmqtrain.train.torch_work import TorchWork
from zmqtrain.train.weighting import taken_apart
from zmqtrain.train.work import Work
from zmqtrain.wire.payload import Value


async def make_work(context: RoleContext, members: Members, task: Task | None = None) -> Work:
    """Like `zmqtrain.train.worker.make_work`, for a worker of a run with an FC server."""
    if context.modelled:
        from zmqtrain.merged_fc.modelled import ModelledLayers
        from zmqtrain.merged_fc.profile_phases import worker_profile
        from zmqtrain.train.modelled_work import ModelledWork

        profile = worker_profile(context.topology)
        return ModelledWork(context, members, profile, ModelledLayers.of(context, profile, members))
    return await TorchWork.make(context, members, task, make_remote=lambda device: MergedLayers(context, device, members))


class MergedLayers:
    """Implements `zmqtrain.train.remote_layers.RemoteLayers` with the FC server. Made on the loop's thread."""

    def __init__(self, context: RoleContext, device: Device, members: Members) -> None:
        self._client = FcClient.of(context, members)
        self._link = FcLink(self._client, device, context.timeouts.barrier_s, Slot.of(context))
        self._topology, self._recorder = context.topology, context.recorder

    def build(self, task: Task, device: Device) -> OwnLayers:
        if task.forward is not None:
            raise UsageError(
                "merged_fc computes a part of the model on the FC server, but Task.forward may call all of it: let batches be "
                "(input, ..., target), or mappings with labels"
            )
        phase, self._optimizer, schedule, facts = build_phase(task, "convolution", self._topology, device)
        return OwnLayers(phase, self._optimizer, schedule, phase.sizes, facts)

    def make_step(self, task: Task, replica: TorchReplica, device: Device, settings: StepSettings) -> MergedStep:
        together = in_step(self._topology) and self._topology.compute.groups > 1
        if (settings.accumulate > 1 or together) and taken_apart(task.loss) is not task.loss:
            raise UsageError(
                "the task's loss has class weights or an ignore_index, which the FC server counts separately in each group and "
                "micro-batch: with merged_fc set [compute] accumulate = 1, and have one group or groups that do not wait for each "
                "other"
            )
        return MergedStep(replica, self._link, device, settings, changes_of(self._optimizer), self._recorder)

    def make_evaluation(self, task: Task, replica: TorchReplica, device: Device, settings: EvaluationSettings) -> Evaluation:
        return MergedEvaluation(task, replica, device, settings, self._recorder, self._link)

    def begin_step(self, step: int) -> None:
        self._client.begin_step(step)

    async def keep(self, step: int, *, save: bool) -> None:
        await self._client.keep(step, save=save)

    async def state(self, step: int) -> Mapping[str, Tensor]:
        return {name: payload.tensor for name, payload in (await self._client.model(step)).items()}

    async def hold(self, held: bool) -> None:
        await self._client.hold(held)

    def abort(self, error: BaseException) -> None:
        self._link.abort(error)

    async def close(self) -> None:
        await self._link.close()


def changes_of(optimizer: Optimizer) -> Hyperparameters:
    """Returns a function that returns the hyperparameters of the optimizer that have changed since now."""
    base = describe_optimizer(optimizer)

    def changed() -> Sequence[Mapping[str, Value] | None] | None:
        found = differing(describe_optimizer(optimizer), base)
        return found if any(found) else None

    return changed


class MergedEvaluation(Evaluation):
    """Evaluates a worker's share of the data together with the FC server, which computes the metrics."""

    def __init__(
        self,
        task: Task,
        replica: TorchReplica,
        device: Device,
        settings: EvaluationSettings,
        recorder: Recorder,
        link: FcLink,
    ) -> None:
        super().__init__(task, replica, device, settings, recorder)
        self._link = link

    def _sums(self, batches: Iterator[Batch], alone: bool) -> Sums:
        """The sums over this worker's batches. In the compute thread. While one batch is computed, the server has the previous
        one."""
        sums = self._metrics.zeros()
        under_way: deque[Begun[Sums]] = deque()
        with self._evaluating():
            for batch, activations in self._outputs(batches):
                with user_code("the target of an evaluation"):
                    under_way.append(self._link.evaluate(activations, batch.target, batch.samples))
                if len(under_way) > 1:
                    sums += under_way.popleft().wait()
        for begun in under_way:
            sums += begun.wait()
        return sums
