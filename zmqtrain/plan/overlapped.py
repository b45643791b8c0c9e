"""How long a step is whose buckets travel while it computes: a worker's forward and backward, and one exchange after another.

A bucket leaves when backward has its gradients, waits for those before it, goes there, is updated, and comes back; the next forward
waits at the first layer whose parameters are not there yet. Steps soon repeat: the length of a late one is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

#: Steps until every one is like the one before: what is on its way at a step's begin left in the step before.
_STEPS = 6


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """A layer as a step sees it."""

    name: str
    nbytes: float
    """Of its parameters."""
    forward_s: float
    """Of a sample, or of as many as it was scaled by."""
    backward_s: float

    def scaled(self, samples: float) -> LayerLoad:
        """The same with the times of so many samples."""
        return replace(self, forward_s=self.forward_s * samples, backward_s=self.backward_s * samples)


@dataclass(frozen=True, slots=True)
class BucketWay:
    """What a byte of the model takes at each stage of its bucket's way. Stages of other buckets go on meanwhile, one at each."""

    ring_byte_s: float = 0.0
    """Between the group's workers, before the servers and once more after them."""
    push_byte_s: float = 0.0
    update_byte_s: float = 0.0
    read_byte_s: float = 0.0
    latency_s: float = 0.0
    """Of a bucket, in all."""
    piece_bytes: float = float("inf")
    """Of a bucket, how much is pushed, updated and read at a time: one stage goes on with what the one before has done."""

    @property
    def stages(self) -> tuple[tuple[str, float], ...]:
        """In order: what is occupied, and how long by a byte."""
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
    """From one step's begin to the next one's. ``loads`` in the order of the forward."""
    compute_s = sum(each.forward_s + each.backward_s for each in loads)
    if not buckets or not (way.stages or way.latency_s):
        return compute_s
    bucket_of = {layer: number for number, layers in enumerate(buckets) for layer in layers}
    completes = {min(layers): number for number, layers in enumerate(buckets)}  # the layer whose backward is a bucket's last
    sizes = [sum(loads[layer].nbytes for layer in layers) for layers in buckets]
    there = [0.0] * len(buckets)  # when its parameters are there
    free: dict[str, float] = {}  # when each stage is free
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
    """When each bucket is back that leaves when it is ``ready``. Whichever can begin a stage first, does."""
    done, may = list(ready), list(ready)  # when a bucket is through its last stage, and when it may begin the next one
    waiting = {number: list(way.stages) for number in range(len(sizes))}
    while waiting := {number: left for number, left in waiting.items() if left}:
        # Of several the one that the next forward needs first.
        start, last = min((max(may[number], free.get(left[0][0], 0.0)), -number) for number, left in waiting.items())
        number = -last
        stage, byte_s = waiting[number].pop(0)
        seconds = sizes[number] * byte_s
        piece_s = seconds * min(1.0, way.piece_bytes / sizes[number])
        done[number] = free[stage] = max(start + seconds, done[number] + piece_s)
        whole = stage == "ring" or not waiting[number] or waiting[number][0][0] == "ring"
        may[number] = done[number] if whole else start + piece_s
    return [time + way.latency_s for time in done]
