"""The length of a step whose buckets are sent while it computes: a worker's forward and backward, and successive exchanges.

A bucket leaves when backward has computed its gradients, waits for earlier buckets, is sent and updated, and comes back. The next
forward waits at the first layer whose parameters have not arrived. Steps soon repeat; the result is the length of a late one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

#: The number of steps until each equals the one before it: what is being sent when a step begins left in the previous step.
_STEPS = 6


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """A layer's times and size in a step."""

    name: str
    nbytes: float
    """The bytes of its parameters."""
    forward_s: float
    """Seconds for one sample, or for the number of samples by which it was scaled."""
    backward_s: float

    def scaled(self, samples: float) -> LayerLoad:
        """The layer with its times multiplied by ``samples``."""
        return replace(self, forward_s=self.forward_s * samples, backward_s=self.backward_s * samples)


@dataclass(frozen=True, slots=True)
class BucketWay:
    """Seconds per byte at each stage of a bucket's path. Each stage handles one bucket at a time, all stages at the same time."""

    ring_byte_s: float = 0.0
    """Between the group's workers: once before the servers and once after them."""
    push_byte_s: float = 0.0
    update_byte_s: float = 0.0
    read_byte_s: float = 0.0
    latency_s: float = 0.0
    """Seconds of latency of a whole bucket."""
    piece_bytes: float = float("inf")
    """Bytes of a bucket that are pushed, updated and read at a time: each stage starts on what the previous one has finished."""

    @property
    def stages(self) -> tuple[tuple[str, float], ...]:
        """The stages in order: what is occupied, and for how many seconds per byte."""
        ring = ("ring", self.ring_byte_s)
        found = (ring, ("push", self.push_byte_s), ("update", self.update_byte_s), ("read", self.read_byte_s), ring)
        return tuple(stage for stage in found if stage[1])


def buckets_of(loads: Sequence[LayerLoad], bucket_bytes: float) -> list[list[int]]:
    """Layers by bucket, both in backward order. Layers without parameters are in none."""
    found: list[list[int]] = []
    size = 0.0
    for index in reversed(range(len(loads))):
        nbytes = loads[index].nbytes
        if not nbytes:
            continue
        if not found or size + nbytes > bucket_bytes:
            found.append([])
            size = 0.0
        found[-1].append(index)
        size += nbytes
    return found


def cycle_s(loads: Sequence[LayerLoad], way: BucketWay, buckets: Sequence[Sequence[int]], *, overlap: bool = True) -> float:
    """Seconds from the start of one step to the start of the next. ``loads`` are in the order of the forward."""
    compute_s = sum(each.forward_s + each.backward_s for each in loads)
    if not buckets or not (way.stages or way.latency_s):
        return compute_s
    bucket_of = {layer: number for number, layers in enumerate(buckets) for layer in layers}
    completes = {min(layers): number for number, layers in enumerate(buckets)}  # layer whose backward completes a bucket -> bucket
    sizes = [sum(loads[layer].nbytes for layer in layers) for layers in buckets]
    there = [0.0] * len(buckets)  # when each bucket's parameters have arrived
    free: dict[str, float] = {}  # when each stage becomes free
    now = begin = before = 0.0
    for _ in range(_STEPS):
        if not overlap:
            now = max(now, *there)
        before, begin = begin, now
        for index, load in enumerate(loads):
            if index in bucket_of:
                now = max(now, there[bucket_of[index]])
            now += load.forward_s
        ready = [0.0] * len(buckets)
        for index in reversed(range(len(loads))):
            now += loads[index].backward_s
            if index in completes:
                ready[completes[index]] = now
        there = _exchanged(sizes, ready if overlap else [now] * len(buckets), way, free)
    return begin - before


def _exchanged(sizes: Sequence[float], ready: Sequence[float], way: BucketWay, free: dict[str, float]) -> list[float]:
    """When each bucket is back, if it leaves when it is ``ready``. The bucket that can start a stage first does so."""
    done, may = list(ready), list(ready)  # when a bucket has finished its last stage, and when it may start the next one
    waiting = {number: list(way.stages) for number in range(len(sizes))}
    while waiting := {number: left for number, left in waiting.items() if left}:
        # Of several, the bucket that the next forward needs first.
        start, last = min((max(may[number], free.get(left[0][0], 0.0)), -number) for number, left in waiting.items())
        number = -last
        stage, byte_s = waiting[number].pop(0)
        seconds = sizes[number] * byte_s
        piece_s = seconds * min(1.0, way.piece_bytes / sizes[number])
        done[number] = free[stage] = max(start + seconds, done[number] + piece_s)
        whole = stage == "ring" or not waiting[number] or waiting[number][0][0] == "ring"
        may[number] = done[number] if whole else start + piece_s
    return [time + way.latency_s for time in done]
