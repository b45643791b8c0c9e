"""A task's `Profile`, measured on this machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from zmqtrain.errors import TaskError, UsageError
from zmqtrain.plan.measure.choose import doubling, levelled_off, smallest_good
from zmqtrain.plan.measure.layer_times import LOSS
from zmqtrain.plan.measure.model import ModelBench, Steps, products
from zmqtrain.plan.measure.peak import Peak, measure_peak, threads
from zmqtrain.plan.measure.timing import Patience
from zmqtrain.train.device.measured import HostSpeed, Measured, MeasuredLayout, Size, Threads
from zmqtrain.train.device.profile import Layer, Profile

#: A step of this many seconds is not made longer, and larger sizes are not tried unless asked for.
LONGEST_STEP_S = 4.0
LARGEST_BATCH = 4096
#: The share of free memory that may be used.
MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings of a measurement: batch sizes, threads, and how often to repeat."""

    batches: tuple[int, ...] = ()
    """Numbers of samples to try; none: 1, 2, 4, ... until throughput stops growing."""
    batch: int = 0
    """Number of samples for the layers' times; 0: the best number."""
    threads: int = 0
    """Number of torch's threads; 0: the best number."""
    processors: int = 1
    """The largest number of threads to try."""
    patience: Patience = field(default_factory=Patience)
    """How long to measure each number of samples and of threads."""
    peak_patience: Patience = field(default_factory=lambda: Patience(0.4, least=7, most=100))
    """How long to measure each way to multiply large matrices, of which the fastest counts."""


@dataclass(frozen=True, slots=True)
class _Peaks:
    one: Peak
    all: Peak


def profile_task(
    bench: ModelBench, asked: Asked, *, name: str, host: str = "", say: Callable[[str], None] = lambda text: None
) -> Profile:
    """Measure everything. ``say`` is called with a text about each measurement. Raises `TaskError` if the task's code fails, and
    `UsageError` if not even the smallest step fits into memory."""
    cpu = bench.device.type == "cpu"
    counted: list[Threads] = []
    count = asked.threads or (asked.processors if cpu else torch.get_num_threads())
    with threads(count):
        sizes = list(_sizes(bench, asked, say))
        if not sizes:
            raise UsageError("not even the smallest step fits into memory: give smaller numbers of samples with --batches")
        best = smallest_good([(size.samples, size.samples_per_s) for size in sizes])
    if cpu and not asked.threads and asked.processors > 1:
        counted = list(_threads(bench, asked, best, say))
        fewer = smallest_good([(each.threads, each.samples_per_s) for each in counted])
        if fewer != count:
            count = fewer
            with threads(count):
                sizes = list(_sizes(bench, asked, say))
                best = smallest_good([(size.samples, size.samples_per_s) for size in sizes])
    batch = asked.batch or best
    with threads(count):
        layouts = tuple(_layouts(bench, asked, best, say))
        say("matrix products")
        first = _peaks(bench, asked, count)
        say(f"layers, {batch} samples")
        steps = bench.steps(batch, asked.patience)
        if all(size.samples != batch for size in sizes):
            sizes.append(_size(steps))
        evaluate_s = bench.evaluate_s(best, asked.patience)
        update_s = bench.update_s(asked.patience)
        # Another process may have disturbed one measurement: the better of two shows what the machine can do.
        peaks = _better(first, _peaks(bench, asked, count))
    operations = products(bench.layers, steps)
    flops = peaks.all.product
    return Profile(
        layers=tuple(_layers(bench, steps, operations, flops)),
        name=name,
        source=f"measured by zmqtrain profile on {host or 'this host'} ({_machine(bench.device)}, {count} threads), "
        f"torch {torch.__version__}",
        update_s=update_s,
        evaluate_s=evaluate_s,
        samples=bench.task.training().samples,
        batch_size=batch,
        measured=Measured(
            device=_machine(bench.device),
            processors=asked.processors,
            threads=count,
            micro_batch=best,
            peak_flops=flops,
            sgemm_flops=peaks.all.sgemm,
            peak_flops_one_thread=peaks.one.product if cpu else 0.0,
            sgemm_flops_one_thread=peaks.one.sgemm if cpu else 0.0,
            conv_share=_conv_share(bench, steps, operations, flops),
            fc_from=bench.fc[0] if bench.fc else "",
            sizes=tuple(sorted(sizes, key=lambda size: size.samples)),
            channels_last=bench.channels_last,
            thread_counts=tuple(counted),
            layouts=layouts,
            hosts=(HostSpeed(host, flops),) if host else (),
        ),
    )


def _sizes(bench: ModelBench, asked: Asked, say: Callable[[str], None]) -> Iterator[Size]:
    """Steps with increasing numbers of samples, until memory, time or throughput end it."""
    rates: list[float] = []
    for samples in asked.batches or doubling(min(LARGEST_BATCH, bench.task.training().samples)):
        if bench.memory_of(samples) > MEMORY_SHARE * bench.memory_free():
            say(f"{samples} samples would not fit into memory")
            return
        say(f"steps of {samples} samples")
        try:
            found = bench.steps(samples, asked.patience)
        except torch.OutOfMemoryError:
            say(f"{samples} samples do not fit into memory")
            return
        except TaskError as error:
            if samples == 1 and not asked.batches and isinstance(error.__cause__, ValueError):
                continue  # batch norm: one sample has no statistics
            raise
        yield _size(found)
        rates.append(found.samples_per_s)
        long = found.conv.median_s + found.fc.median_s > LONGEST_STEP_S
        if not asked.batches and (long or levelled_off(rates)):
            return


def _threads(bench: ModelBench, asked: Asked, samples: int, say: Callable[[str], None]) -> Iterator[Threads]:
    for count in doubling(asked.processors):
        say(f"{count} threads")
        with threads(count):
            yield Threads(count, bench.steps(samples, asked.patience).samples_per_s)


def _layouts(bench: ModelBench, asked: Asked, samples: int, say: Callable[[str], None]) -> Iterator[MeasuredLayout]:
    """Images with channels first and last, in models that have any."""
    if not any(layer.image for layer in bench.layers):
        return
    asked_for = bench.channels_last
    try:
        for last in (False, True):
            bench.channels_last = last
            name = "last" if last else "first"
            say(f"channels {name}")
            try:
                yield MeasuredLayout(name, bench.steps(samples, asked.patience).samples_per_s)
            except TaskError as error:
                if last == asked_for:
                    raise
                say(f"the model does not accept images with channels {name}: {error}")
    finally:
        bench.channels_last = asked_for


def _size(steps: Steps) -> Size:
    return Size(steps.samples, steps.conv.median_s, steps.fc.median_s, steps.conv.spread_s, steps.fc.spread_s, memory=steps.memory)


def _peaks(bench: ModelBench, asked: Asked, count: int) -> _Peaks:
    every = measure_peak(bench.device, asked.peak_patience)
    if bench.device.type != "cpu" or count == 1:
        return _Peaks(every, every)
    with threads(1):
        return _Peaks(measure_peak(bench.device, asked.peak_patience), every)


def _better(one: _Peaks, other: _Peaks) -> _Peaks:
    def of(left: Peak, right: Peak) -> Peak:
        return Peak(max(left.sgemm, right.sgemm), max(left.product, right.product))

    return _Peaks(of(one.one, other.one), of(one.all, other.all))


def _layers(bench: ModelBench, steps: Steps, operations: dict[str, float], flops: float) -> Iterator[Layer]:
    for shape in bench.layers:
        forward, backward = steps.times.of(shape.name)
        seconds = forward.median_s + backward.median_s
        share = operations.get(shape.name, 0.0) / seconds / flops if seconds and flops else 0.0
        module = bench.model.get_submodule(shape.name)
        dtype = next((str(parameter.dtype) for parameter in module.parameters()), "torch.float32")
        yield Layer(
            shape.name,
            shape.weights,
            forward.median_s,
            backward.median_s,
            dtype=dtype.removeprefix("torch."),
            flops_forward=shape.flops * shape.calls,
            activation_numel=shape.numel_out * shape.calls,
            kind=shape.kind,
            phase="fc" if shape.name in bench.fc else "conv",
            forward_spread_s=forward.spread_s,
            backward_spread_s=backward.spread_s,
            peak_share=share,
        )
    forward, backward = steps.times.of(LOSS)
    name = LOSS if all(shape.name != LOSS for shape in bench.layers) else "the loss"
    yield Layer(
        name,
        0,
        forward.median_s,
        backward.median_s,
        kind="other",
        phase="fc",
        forward_spread_s=forward.spread_s,
        backward_spread_s=backward.spread_s,
    )


def _conv_share(bench: ModelBench, steps: Steps, operations: dict[str, float], flops: float) -> float:
    names: Sequence[str] = [shape.name for shape in bench.layers if shape.kind == "conv" and shape.name in operations]
    seconds = steps.times.together(names).median_s if names else 0.0
    return sum(operations[name] for name in names) / seconds / flops if seconds and flops else 0.0


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
