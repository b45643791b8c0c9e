"""What `zmqtrain profile` measures beside the times of layers: how they grow with the samples, the machine, and its links."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zmqtrain.train.device.fields import check_fields


@dataclass(frozen=True, slots=True)
class Size:
    """A step of so many samples, as it was measured. Spreads are half the distance between the quartiles."""

    samples: int
    conv_s: float
    """Forward and backward of the layers before the FC phase: t_conv."""
    fc_s: float
    """The same of the FC phase and the loss: t_fc."""
    conv_spread_s: float = 0.0
    fc_spread_s: float = 0.0
    memory: int = 0
    """Bytes that it needs beside the parameters: measured on an accelerator, estimated elsewhere."""

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.conv_s + self.fc_s

    @property
    def samples_per_s(self) -> float:
        """Throughput."""
        return self.samples / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Threads:
    """How fast a step was with so many threads."""

    threads: int
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class Layout:
    """How fast a step was with images that lie in memory so."""

    layout: str
    """Where the channels are: ``first`` or ``last``."""
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """How fast a host multiplies matrices."""

    name: str
    flops: float
    """Of a large product in single precision, with all processors that its workers may use, a second."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The way from one host to another, between two processes and through all that endpoints do."""

    source: str
    target: str
    bandwidth: float
    """Bits a second of a bulk transfer."""
    latency_s: float
    """Half a round trip of a small message."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All of it."""

    device: str = ""
    processors: int = 0
    threads: int = 0
    """With which the times of the profile were measured, and which gave the best throughput where that was tried."""
    micro_batch: int = 0
    """The fewest samples with the best throughput, of those that fit into memory: Omnivore's b_p."""
    peak_flops: float = 0.0
    """The fastest large product of matrices in single precision, a second, with these threads: what layers are compared with."""
    sgemm_flops: float = 0.0
    """The same by the library that torch multiplies matrices with."""
    peak_flops_one_thread: float = 0.0
    sgemm_flops_one_thread: float = 0.0
    conv_share: float = 0.0
    """Of the peak, which all convolutions together reach in forward and backward; 0: there are none."""
    fc_from: str = ""
    """The first layer of the FC phase."""
    channels_last: bool = False
    """Whether images lay in memory so."""
    sizes: tuple[Size, ...] = ()
    thread_counts: tuple[Threads, ...] = ()
    layouts: tuple[Layout, ...] = ()
    hosts: tuple[HostSpeed, ...] = ()
    links: tuple[LinkSpeed, ...] = ()

    @classmethod
    def of(cls, values: Any) -> Measured:
        """From a profile's ``measured``. Raises `ValueError` that says what is wrong."""
        if not isinstance(values, dict):
            raise ValueError(f"measured is {values!r:.60}, where an object belongs")
        rest = {**values}
        for name, kind in _LISTS.items():
            rest[name] = _list(name, kind, values.get(name, []))
        check_fields("measured", cls, rest)
        sizes = rest["sizes"]
        if [size.samples for size in sizes] != sorted({size.samples for size in sizes if size.samples}):
            raise ValueError("measured: sizes must go up, from 1 sample on")
        return cls(**rest)

    def to_values(self) -> dict[str, Any]:
        """What `of` takes."""
        return asdict(self)

    def conv_s(self, samples: float) -> float:
        """t_conv of a worker's step of so many samples, between and beyond the sizes that were measured."""
        return _between([(size.samples, size.conv_s) for size in self.sizes], samples)

    def fc_s(self, samples: float) -> float:
        """t_fc of so many samples."""
        return _between([(size.samples, size.fc_s) for size in self.sizes], samples)


_LISTS: Mapping[str, type[Any]] = {
    "sizes": Size,
    "thread_counts": Threads,
    "layouts": Layout,
    "hosts": HostSpeed,
    "links": LinkSpeed,
}


def _list(name: str, kind: type[Any], values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"measured: {name} is {values!r:.60}, where a list belongs")
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            raise ValueError(f"measured: {name} {number} is {value!r:.60}, where an object belongs")
        check_fields(f"measured: {name} {number}", kind, value)
    return tuple(kind(**value) for value in values)


def _between(points: Sequence[tuple[int, float]], samples: float) -> float:
    """Straight lines between the points. Before the first the time stays; beyond the last each sample takes as long as in it."""
    if not points:
        raise ValueError("no sizes were measured")
    place = bisect_left([size for size, _ in points], samples)
    if place == 0:
        return points[0][1]
    if place == len(points):
        size, seconds = points[-1]
        return seconds * samples / size
    (size, seconds), (above, more) = points[place - 1], points[place]
    return seconds + (more - seconds) * (samples - size) / (above - size)
