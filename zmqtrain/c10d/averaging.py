"""Groups of ranks that train alone and combine their models every few steps, for programs with DistributedDataParallel."""

# Annotations must not be strings here: DistributedDataParallel compares those of its hooks with its own types.

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from zmqtrain.c10d.groups import Groups, average_over_ranks
from zmqtrain.errors import UsageError
from zmqtrain.exchange.averaging.methods import Average, Elastic, Method, Outer
from zmqtrain.wire.tensor import TensorPayload


class Averaging:
    """The state of `ddp_comm_hook`: the ranks are divided into groups (those of a host, for example) that each average their
    gradients exactly in every step, and their models with all other groups every few steps only: DiLoCo (Douillard et al. 2023),
    local SGD or elastic averaging.

    ::

        dist.init_process_group("zmq")
        averaging = zmqtrain.Averaging(model, every=50)         # all begin with the same parameters
        replica = DistributedDataParallel(model, process_group=averaging.within)
        replica.register_comm_hook(averaging, zmqtrain.ddp_comm_hook)
        ...
        optimizer.step()
        averaging.step()                                        # after each step of the optimizer
        ...
        averaging.average(model)                                # before evaluating, and at the end
    """

    def __init__(
        self,
        model: nn.Module,
        group_size: int | None = None,
        *,
        every: int = 50,
        method: Literal["outer", "average", "elastic"] = "outer",
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        alpha: float | None = None,
    ) -> None:
        """All ranks make one, at the same point of the program.

        Args:
            model: its parameters and buffers become the mean of all ranks'.
            group_size: the number of consecutive ranks in a group; by default those of a host (``LOCAL_WORLD_SIZE``).
            every: the number of steps from one exchange to the next.
            method: outer: the mean change of the groups' models is the gradient of an outer optimizer (DiLoCo). average: all take
                the mean. elastic: all are pulled towards a common center.
            outer_lr: learning rate of the outer optimizer.
            outer_momentum: its Nesterov momentum.
            alpha: how far elastic pulls; by default 0.9 divided by the number of groups.

        Raises `ValueError` if the world cannot be divided in this way.
        """
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1")
        groups = Groups(group_size)
        self._size, self._world, self._every, self._steps = groups.size, groups.world, every, 0
        self.within: Any = groups.within
        """The process group of this rank's own group, for DistributedDataParallel."""
        average_over_ranks(model)
        self._parameters = [each for each in model.parameters() if each.requires_grad and each.numel()]
        make: dict[str, Callable[[], Method]] = {
            "outer": lambda: Outer(outer_lr, outer_momentum),
            "average": Average,
            "elastic": lambda: Elastic(groups.number, alpha),
        }
        if method not in make:
            raise ValueError(f"method is {method!r}; it must be one of {', '.join(make)}")
        self._method = make[method]()
        begun = [_flat_copy(parameter) for parameter in self._parameters]
        for index, copy in enumerate(begun):
            self._method.begin(index, TensorPayload.of(copy))
        self._begun = None if method == "average" else begun  # until the first step
        self._other_model = False

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket's gradients over this rank's group, in place."""
        if self._begun is not None:
            now = zip(self._begun, self._parameters, strict=True)
            self._other_model = not all(torch.allclose(copy, parameter.detach().reshape(-1)) for copy, parameter in now)
            self._begun = None
        gradients = bucket.buffer().div_(self._size)
        handle = dist.all_reduce(gradients, group=self.within, async_op=True)
        assert handle is not None
        future: torch.futures.Future[Tensor] = handle.get_future().then(lambda done: done.value()[0])
        return future

    def step(self) -> None:
        """The optimizer has made a step: combine the models if it is time to. All ranks call it equally often.

        Raises `UsageError` if another model was loaded before the first step, since models are measured against the one that this
        was made with."""
        if self._other_model:
            raise UsageError(
                "the parameters are others than those with which Averaging was made, towards which they would be pulled back: load "
                "a model before you make Averaging"
            )
        self._steps += 1
        if self._steps % self._every:
            return
        with torch.no_grad():
            parts = [_flat_copy(each) for each in self._parameters]
            own = [self._method.travels(index, TensorPayload.of(part)) for index, part in enumerate(parts)]
            means, handles = [torch.empty_like(part) for part in parts], []
            for mean, payload in zip(means, own, strict=True):
                TensorPayload.of(mean).copy_(payload)
                handles.append(dist.all_reduce(mean, async_op=True))
            for index, (parameter, part, mean) in enumerate(zip(self._parameters, parts, means, strict=True)):
                handle = handles[index]
                assert handle is not None
                handle.wait()
                mean.div_(self._world)  # ranks of a group have the same model, so this is the mean over the groups
                self._method.apply(index, TensorPayload.of(part), own[index], TensorPayload.of(mean), mix=0.0)
                parameter.copy_(part.view(parameter.shape))

    def average(self, model: nn.Module) -> None:
        """Give all ranks the mean of their parameters and buffers; integers become rank 0's. All ranks call it."""
        average_over_ranks(model)


def _flat_copy(parameter: Tensor) -> Tensor:
    """Contiguous, as exchanges need it; the parameter need not be."""
    return parameter.detach().clone(memory_format=torch.contiguous_format).view(-1)
