"""What `zmqtrain profile` measures beside the times of layers: how these grow with the batch, and the speed of host and links."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zmqtrain.train.device.fields import check_fields


@dataclass(frozen=True, slots=True)
class Size:
    """A measured step of ``samples`` samples. Spreads are half the interquartile range."""

    samples: int
    conv_s: float
    """t_conv: forward and backward of the layers before the FC phase."""
    fc_s: float
    """t_fc: forward and backward of the FC phase and the loss."""
    conv_spread_s: float = 0.0
    fc_spread_s: float = 0.0
    memory: int = 0
    """Bytes needed beside the parameters: measured on an accelerator, estimated elsewhere."""

    @property
    def seconds(self) -> float:
        """The time of forward and backward."""
        return self.conv_s + self.fc_s

    @property
    def samples_per_s(self) -> float:
        """Throughput of the step."""
        return self.samples / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Threads:
    """The measured speed of a step with ``threads`` threads."""

    threads: int
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class MeasuredLayout:
    """The measured speed of a step with images in a given memory layout."""

    layout: str
    """The position of the channels: ``first`` or ``last``."""
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """The measured speed of a host."""

    name: str
    flops: float
    """Operations per second in a large single-precision matrix product on all processors that the host's workers may use."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The measured speed between two processes of two hosts, through zmqtrain's endpoints."""

    source: str
    target: str
    bandwidth: float
    """Bits per second of a bulk transfer."""
    latency_s: float
    """Seconds: half the round trip of a small message."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a device in all steps."""

    device: str = ""
    processors: int = 0
    threads: int = 0
    """Threads with which the profile's times were measured; the fastest number, if several were tried."""
    micro_batch: int = 0
    """b_p of Omnivore: the smallest batch with the best throughput, of those that fit into memory."""
    peak_flops: float = 0.0
    """Operations per second of the fastest large single-precision matrix product with these threads: the peak for all layers."""
    sgemm_flops: float = 0.0
    """The same, with the library that torch uses for matrix products."""
    peak_flops_one_thread: float = 0.0
    sgemm_flops_one_thread: float = 0.0
    conv_share: float = 0.0
    """The share of the peak that all convolutions together reach in forward and backward; 0 if there are none."""
    fc_from: str = ""
    """The first layer of the FC phase."""
    channels_last: bool = False
    """Whether images were measured with their channels last in memory."""
    sizes: tuple[Size, ...] = ()
    thread_counts: tuple[Threads, ...] = ()
    layouts: tuple[MeasuredLayout, ...] = ()
    hosts: tuple[HostSpeed, ...] = ()
    links: tuple[LinkSpeed, ...] = ()

    @classmethod
    def of(cls, values: Any) -> Measured:
        """Check and convert a profile's ``measured`` object. Raises `ValueError` that says what is wrong."""
        if not isinstance(values, dict):
            raise ValueError(f"measured is {values!r:.60}; it must be an object")
        rest = {**values}
        for name, kind in _LISTS.items():
            rest[name] = _list(name, kind, values.get(name, []))
        check_fields("measured", cls, rest)
        sizes = rest["sizes"]
        if [size.samples for size in sizes] != sorted({size.samples for size in sizes if size.samples}):
            raise ValueError("measured: sizes must be in ascending order, from 1 sample on")
        return cls(**rest)

    def to_values(self) -> dict[str, Any]:
        """The JSON form, which `of` reads."""
        return asdict(self)

    def conv_s(self, samples: float) -> float:
        """t_conv, in seconds, of a worker's step of ``samples`` samples, inside and outside the measured range."""
        return _between([(size.samples, size.conv_s) for size in self.sizes], samples)

    def fc_s(self, samples: float) -> float:
        """t_fc, in seconds, of ``samples`` samples."""
        return _between([(size.samples, size.fc_s) for size in self.sizes], samples)


_LISTS: Mapping[str, type[Any]] = {
    "sizes": Size,
    "thread_counts": Threads,
    "layouts": MeasuredLayout,
    "hosts": HostSpeed,
    "links": LinkSpeed,
}


def _list(name: str, kind: type[Any], values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"measured: {name} is {values!r:.60}; it must be a list")
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            raise ValueError(f"measured: {name} {number} is {value!r:.60}; it must be an object")
        check_fields(f"measured: {name} {number}", kind, value)
    return tuple(kind(**value) for value in values)


def _between(points: Sequence[tuple[int, float]], samples: float) -> float:
    """Interpolate linearly. Below the first point the value is constant; above the last it grows with its value per sample."""
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
