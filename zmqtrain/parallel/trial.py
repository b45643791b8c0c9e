"""Some steps of a divided model on modelled compute: how long they take, and for what they wait.

The model's own code runs on tensors without content, its messages travel over whatever network the fabric has, and its operators
take the device's time. So what a plan costs can be measured where the hardware is not at hand: on an emulated network in
real time, or on a simulated one in virtual time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zmqtrain.events import EventValue
from zmqtrain.parallel.communicator import Fabric, Label
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.traffic import Sent, Traffic
from zmqtrain.parallel.modelled import ModelledCompute, without_content
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.plan import Plan
from zmqtrain.parallel.rehearsal import train_step
from zmqtrain.parallel.sums import GradientSums


@dataclass(frozen=True, slots=True)
class Trial:
    """What to try. Plain values and shapes, so that it can be handed to another process together with the model."""

    grid: Grid
    plan: Plan | None
    batch: int
    flops_per_s: float = 0.0
    """Of a process; 0: compute takes no time, so that a step is its communication."""
    bytes_per_s: float = 0.0
    """Of what operators without products write; 0: these take no time."""
    steps: int = 3
    overlap: bool = True
    """Whether halos and sums of weight gradients travel while something is computed."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on one process: of the trace."""

    step: int
    name: str
    category: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(slots=True)
class Tried:
    """The measurements of one process in a trial."""

    step_s: list[float] = field(default_factory=list)
    compute_s: float = 0.0
    """The seconds of arithmetic in each step."""
    spans: list[Span] = field(default_factory=list)
    sent: Traffic = field(default_factory=dict)
    """What this process sends in a step."""

    def waited_s(self, term: str, step: int) -> float:
        """How long a step waited for messages of a term."""
        return sum(span.seconds for span in self._of(term, step, "wait"))

    def travelled_s(self, term: str, step: int) -> float:
        """How long such messages were on their way, from when they were begun until all were there."""
        return sum(span.seconds for span in self._of(term, step, "receive"))

    def late_interiors(self) -> list[str]:
        """Halos that were there before the interior of their layer was begun, in any step and direction: there should be none."""
        found = []
        for step in range(len(self.step_s)):
            spans = [span for span in self.spans if span.step == step]
            began = {span.name.removeprefix("interior of "): span.start_s for span in spans if span.name.startswith("interior of ")}
            for span in spans:
                if span.category == "receive" and span.name.startswith("halo of "):
                    layer = span.name.removeprefix("halo of ").removesuffix(" (forward)")
                    if layer in began and began[layer] >= span.end_s:
                        found.append(layer)
        return found

    def _of(self, term: str, step: int, category: str) -> Iterator[Span]:
        prefix = f"{term} of " if category == "receive" else f"wait for {term} of "
        return (each for each in self.spans if (each.step, each.category) == (step, category) and each.name.startswith(prefix))


class Spender(Protocol):
    """Lets time pass in the compute thread."""

    def spend(self, seconds: float) -> None:
        """Let ``seconds`` of this thread's time pass."""
        ...

    def restart(self) -> None:
        """The thread has waited for something else: what it spends next begins now."""


class CountingFabric(Fabric, Protocol):
    """A fabric that says what it has sent."""

    messages: Counter[Label]
    nbytes: Counter[Label]


class TrialRecorder:
    """Implements `Recorder` for one process of a trial; keeps spans in memory."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.spans: list[Span] = []
        self.step = -1
        self.waited: Callable[[], None] = lambda: None
        """Called when the thread has waited for the network."""
        self._clock = clock
        self._waits = 0  # a layer's wait for its halo is around the fabric's

    def event(self, kind: str, /, *, step: int | None = None, **values: EventValue) -> None:
        return None

    def span(self, name: str, category: str, /, *, step: int | None = None) -> AbstractContextManager[object]:
        return self._measure(name, category)

    @contextmanager
    def _measure(self, name: str, category: str) -> Iterator[None]:
        start_s, waits = self._clock(), category == "wait"
        self._waits += waits
        try:
            yield
        finally:
            self._waits -= waits
            if not (waits and self._waits):
                self.spans.append(Span(self.step, name, category, start_s, self._clock()))
            if waits:
                self.waited()

    def add_span(
        self,
        name: str,
        category: str,
        start_s: float,
        end_s: float,
        *,
        step: int | None = None,
        values: Mapping[str, EventValue] | None = None,
    ) -> None:
        self.spans.append(Span(self.step, name, category, start_s, end_s))

    def audit(self, what: str, /, **values: object) -> None:
        return None


def try_out(
    model: nn.Module,
    inputs: Sequence[Any],
    trial: Trial,
    fabric: CountingFabric,
    recorder: TrialRecorder,
    spender: Spender,
    clock: Callable[[], float],
) -> Tried:
    """Run the trial's steps in the compute thread. All processes of the group must, with equal models.

    Arguments:
        inputs: of a few samples, whose shapes and types count.
        recorder: the one that the fabric was made with.
        spender: lets the compute's time pass.
        clock: in seconds, as the recorder's.
    """
    parallel = parallelize(without_content(model), trial.grid, trial.plan, fabric=fabric, recorder=recorder)
    parallel.batch.size = trial.batch
    parallel.overlap = trial.overlap
    sums = GradientSums(parallel, fabric, parallel.shards_by_name(), overlap=trial.overlap)
    everybody = fabric.among(tuple(range(fabric.size)))
    together = Label("trial", "statistics")
    found, recorder.waited = Tried(spans=recorder.spans), spender.restart
    compute = ModelledCompute(spender.spend, trial.flops_per_s, trial.bytes_per_s) if trial.flops_per_s else None
    for step in range(trial.steps):
        everybody.all_reduce(_nothing(), together).wait()
        spender.restart()
        recorder.step = step
        before = compute.spent_s if compute is not None else 0.0
        messages, nbytes = Counter(fabric.messages), Counter(fabric.nbytes)
        start_s = clock()
        parallel.zero_grad()
        with compute if compute is not None else nullcontext():
            train_step(parallel, inputs)
            sums.finish()
        found.step_s.append(clock() - start_s)
        found.compute_s = compute.spent_s - before if compute is not None else 0.0
        found.sent = {
            label: Sent(count, fabric.nbytes[label] - nbytes[label]) for label, count in (fabric.messages - messages).items()
        }
        recorder.step = -1
    everybody.all_reduce(_nothing(), together).wait()  # no process leaves before all are through
    return found


def _nothing() -> Tensor:
    return torch.empty(1, device="meta")
