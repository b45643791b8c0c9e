"""What a worker has besides, where the fully connected layers are merged on the FC server: its phase, its link, its evaluation."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zmqtrain.data.batch import Batch
from zmqtrain.data.bridge import Begun
from zmqtrain.exchange.fc_client import FcClient
from zmqtrain.exchange.optimizer import describe_optimizer
from zmqtrain.exchange.server_messages import differing
from zmqtrain.membership.context import RoleContext
from zmqtrain.parallel.network import NetworkFabric
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.base import Device
from zmqtrain.train.evaluate import Evaluation, EvaluationSettings
from zmqtrain.train.fc_link import FcLink
from zmqtrain.train.merged_step import Hyperparameters
from zmqtrain.train.metrics import Sums
from zmqtrain.train.phases import Phase, PhaseName, split_model
from zmqtrain.train.replica import TorchReplica
from zmqtrain.train.slot import Slot
from zmqtrain.train.task import Task, build_model, build_optimizer_of, user_code
from zmqtrain.wire.payload import Value

#: Roles that run in one process share torch's random state; each seeds and builds its model undisturbed.
BUILDING = threading.Lock()


@dataclass(frozen=True, slots=True)
class BuiltPhase:
    """A phase of the task's model, and the optimizer with those of its parameters alone."""

    model: Phase
    optimizer: Optimizer
    schedule: LRScheduler | None


def build_optimizer(task: Task, model: nn.Module, topology: Topology) -> tuple[Optimizer, LRScheduler | None]:
    """The task's, as ``[optimizer]`` changes it."""
    settings = topology.optimizer
    return build_optimizer_of(
        task,
        model,
        lr_factor=settings.lr_factor(topology.compute.groups),
        lr=settings.lr,
        momentum=settings.explicit_momentum,
    )


def build_phase(task: Task, name: PhaseName, topology: Topology, device: Device) -> BuiltPhase:
    """Build the whole model, in the compute thread and with torch seeded, and keep one phase of it.

    The optimizer keeps all its parameter groups, some of them empty perhaps. Raises `TaskError`, and `UsageError` for a model that
    cannot be split.
    """
    model = build_model(task).to(device.torch_device)
    optimizer, schedule = build_optimizer(task, model, topology)
    phase = split_model(model, name, topology.exchange.split)
    own = {id(parameter) for parameter in phase.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
    return BuiltPhase(phase, optimizer, schedule)


def make_link(context: RoleContext, device: Device) -> FcLink | None:
    """This worker's link to the FC server, on the loop's thread; ``None`` where there is no such server."""
    if not context.placement.fc_roles:
        return None
    client = FcClient(context.endpoint, context.placement.fc_roles[0].peer, context.ladder)
    return FcLink(client, device, context.ladder.barrier_s, Slot.of(context))


def make_fc_fabric(context: RoleContext, device: Device) -> NetworkFabric | None:
    """An FC server's connections to the others, on the loop's thread; ``None`` where it is the only one."""
    if context.placement.fc_servers < 2:
        return None
    return NetworkFabric(
        context.endpoint,
        tuple(role.peer for role in context.placement.fc_roles),
        "fc",
        condition=device.condition(),
        clock=device.clock,
        timeout_s=context.ladder.barrier_s,
        recorder=context.recorder,
    )


def changes_of(optimizer: Optimizer) -> Hyperparameters:
    """What has changed of the optimizer's hyperparameters since now, whenever it is called."""
    base = describe_optimizer(optimizer)

    def changed() -> Sequence[Mapping[str, Value] | None] | None:
        found = differing(describe_optimizer(optimizer), base)
        return found if any(found) else None

    return changed


class MergedEvaluation(Evaluation):
    """Evaluates a worker's share of the data together with the FC server, which computes the metrics."""

    def __init__(self, task: Task, replica: TorchReplica, device: Device, settings: EvaluationSettings, link: FcLink) -> None:
        super().__init__(task, replica, device, settings)
        self._link = link

    def _sums(self, batches: Iterator[Batch]) -> Sums:
        """In the compute thread. While one batch is computed, the server has the one before."""
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
