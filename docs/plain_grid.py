"""Every setting of a grid, each with several orders of the data, trained side by side: what `plain_runs.py` does one by one.

Small models leave a processor idle between one operation and the next. Here one operation computes for all settings of a number of
groups, so that the losses of sixty trainings take as long as those of a few.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from plain_runs import SPREAD, batch_indices
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from zmqtrain import Task
from zmqtrain.tune.trial import Setting, Smoothed

#: After this part of the updates that the target was drawn for, settings are given up that are less than half as far as the best.
EARLY, HALF = 0.5, 0.5
#: Beyond this multiple of the lowest median so far, nothing is trained.
BEYOND = 1.3


@dataclass
class Reached:
    """When a setting reached the target, order by order; infinite for never."""

    seconds: list[float]
    updates: list[float]


class SideBySide:
    """All settings of some numbers of groups."""

    def __init__(self, task: Task, batch: int, seed: int, update_s: Mapping[int, float], orders: Sequence[int]) -> None:
        """``seed``: of the job. ``orders``: the seeds of the orders of the data."""
        self._task, self._batch, self._seed, self._update_s, self._orders = task, batch, seed, update_s, orders
        self._best_s = math.inf

    def reach(self, settings: Sequence[Setting], target: float, smooth: int, scale: int, most: int) -> dict[Setting, Reached]:
        """When each of them reaches ``target``. ``scale``: about the updates that the best needs. ``most``: updates at most."""
        found: dict[Setting, Reached] = {}
        for groups in sorted({each.groups for each in settings}):
            found |= self._groups(groups, [each for each in settings if each.groups == groups], target, smooth, scale, most)
        return found

    def _groups(
        self, groups: int, settings: list[Setting], target: float, smooth: int, scale: int, most: int
    ) -> dict[Setting, Reached]:
        torch.manual_seed(self._seed)
        model = self._task.model()
        count = len(self._orders)
        inputs, targets = self._task.train_data.tensors  # type: ignore[attr-defined]
        step = self._gradients(model)
        # Dimensions: orders, settings, the parameter's own.
        now = {name: p.detach().expand(count, len(settings), *p.shape).clone() for name, p in model.named_parameters()}
        moved = {name: torch.zeros_like(p) for name, p in now.items()}
        read = {name: p.expand(groups, *p.shape).clone() for name, p in now.items()} if groups > 1 else None
        rates, momenta = torch.tensor([each.lr for each in settings]), torch.tensor([each.momentum for each in settings])
        data = [batch_indices(len(inputs), self._batch, seed) for seed in self._orders]
        turns = [self._turns(groups, seed) for seed in self._orders]
        smoothed = [[Smoothed(smooth) for _ in settings] for _ in self._orders]
        found = {each: Reached([math.inf] * count, [math.inf] * count) for each in settings}
        alive, first, every = list(settings), math.nan, torch.arange(count)
        for update in range(1, most + 1):
            ends = [next(each) for each in turns]  # order by order: the time, and the group
            index = torch.stack([next(each) for each in data])
            of = torch.tensor([group for _, group in ends])
            at = now if read is None else {name: p[of, every] for name, p in read.items()}
            gradients, losses = step(at, inputs[index], targets[index])
            for name, gradient in gradients.items():
                shape = (1, len(alive), *(1 for _ in gradient.shape[2:]))
                moved[name].mul_(momenta.view(shape)).add_(gradient)
                now[name].sub_(rates.view(shape) * moved[name])
                if read is not None:
                    read[name][of, every] = now[name]
            for order, row in enumerate(losses.tolist()):
                for place, loss in enumerate(row):
                    mean, setting = smoothed[order][place], alive[place]
                    if mean.add(loss) <= target and mean.settled and math.isinf(found[setting].seconds[order]):
                        found[setting].seconds[order], found[setting].updates[order] = ends[order][0], update
            if update == 1:
                first = losses.mean().item()
            for setting in alive:
                self._best_s = min(self._best_s, sorted(found[setting].seconds)[count // 2])
            seconds = min(end for end, _ in ends)
            if seconds > BEYOND * self._best_s:
                break
            if update % 20 == 0:
                come = [sorted(first - each[place].value for each in smoothed)[count // 2] for place in range(len(alive))]
                far = max((each for each in come if math.isfinite(each)), default=0.0)
                least = HALF * far if update >= EARLY * scale else -math.inf
                done = [all(map(math.isfinite, found[each].seconds)) for each in alive]
                keep = [
                    place
                    for place, each in enumerate(come)
                    if math.isfinite(each) and each >= max(least, -2 * abs(first)) and not done[place]
                ]
                if not keep:
                    break
                if len(keep) < len(alive):
                    alive, rates, momenta = [alive[place] for place in keep], rates[keep], momenta[keep]
                    smoothed = [[each[place] for place in keep] for each in smoothed]
                    now, moved = ({name: p[:, keep].clone() for name, p in each.items()} for each in (now, moved))
                    if read is not None:
                        read = {name: p[:, :, keep].clone() for name, p in read.items()}
        return found

    def _gradients(self, model: nn.Module) -> Callable[..., tuple[dict[str, Tensor], Tensor]]:
        """Parameters, inputs and targets of all orders and settings to gradients and losses."""

        def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            if type(model).__name__ == "Lstm":  # of a module that `load_task` has loaded once more
                return self._task.loss(unrolled(parameters, inputs), targets)
            return self._task.loss(functional_call(model, parameters, (inputs,)), targets)

        all_of = vmap(grad_and_value(loss))

        def step(parameters: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            orders, settings = next(iter(parameters.values())).shape[:2]
            data = [each.unsqueeze(1).expand(-1, settings, *each.shape[1:]).flatten(0, 1) for each in (inputs, targets)]
            gradients, losses = all_of({name: p.flatten(0, 1) for name, p in parameters.items()}, *data)
            return {name: g.unflatten(0, (orders, settings)) for name, g in gradients.items()}, losses.view(orders, settings)

        return step

    def _turns(self, groups: int, seed: int) -> Iterator[tuple[float, int]]:
        """When each update is made, and by which group, as `PlainRuns` has it."""
        chance, update_s = random.Random(seed), self._update_s[groups]

        def takes_s() -> float:
            return groups * update_s * max(0.1, chance.gauss(1.0, SPREAD))

        ends = [(takes_s() * (1 + group) / groups, group) for group in range(groups)]
        heapq.heapify(ends)
        while True:
            now, group = heapq.heappop(ends)
            yield now, group
            heapq.heappush(ends, (now + takes_s(), group))


def unrolled(parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """What `Lstm` computes, out of operations that can be made for many parameters at once."""
    weights = [parameters[f"lstm.{name}_l0"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    state = cell = inputs.new_zeros(inputs.shape[0], weights[1].shape[1])
    from_inputs, outputs = inputs @ weights[0].T + weights[2] + weights[3], []
    for now in from_inputs.unbind(1):
        enters, keeps, new, leaves = (now + state @ weights[1].T).chunk(4, -1)
        cell = torch.sigmoid(keeps) * cell + torch.sigmoid(enters) * torch.tanh(new)
        state = torch.sigmoid(leaves) * torch.tanh(cell)
        outputs.append(state)
    return torch.stack(outputs, 1) @ parameters["output.weight"].T + parameters["output.bias"]
