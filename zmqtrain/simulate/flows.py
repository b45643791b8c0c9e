"""Flows that share resources fairly: a fluid model of a network, without packets. Sans-IO.

A resource carries a number of bytes per second: a NIC's sending side, its receiving side, a rack's uplink. A flow uses all
resources on its path at one rate. Rates are *max-min fair*: no flow could be faster without slowing down one that is no faster.
TCP's flows come close to that, and with a queue for each flow everywhere it is exact (Bertsekas and Gallager, Data Networks,
section 6.5.2: progressive filling).

Only rates that a change can affect are recomputed: those of the flows connected with it by shared resources.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence


class Resource:
    """Something that flows share. ``capacity`` is in bytes per second."""

    __slots__ = ("capacity", "flows", "name", "packets_until")

    def __init__(self, name: str, capacity: float) -> None:
        if not capacity > 0:
            raise ValueError(f"{name} carries {capacity} bytes per second; it must be more than 0")
        self.name = name
        self.capacity = capacity
        self.flows: dict[Flow, None] = {}
        self.packets_until = 0.0
        """When the single packets given to it have left."""

    def __repr__(self) -> str:
        return f"Resource({self.name}, {self.capacity:g} B/s, {len(self.flows)} flows)"


class Flow:
    """Bytes on a path through resources. Idle until `FlowTable.start`."""

    __slots__ = ("path", "rate", "remaining", "since")

    def __init__(self, path: Sequence[Resource]) -> None:
        self.path = tuple(path)
        self.rate = 0.0
        """Bytes per second, since ``since``."""
        self.remaining = 0.0
        """Bytes left at ``since``."""
        self.since = 0.0

    @property
    def finishes_at(self) -> float:
        """When it ends, if no rate changes before."""
        if self.rate == math.inf:
            return self.since
        return self.since + self.remaining / self.rate if self.rate > 0 else math.inf

    def reschedule(self) -> None:
        """The rate has changed, and with it `finishes_at`."""


def slip_through(path: Iterable[Resource], nbytes: float, now: float) -> float:
    """When a message of a single packet has left, if it goes between the packets of all flows.

    It takes no noticeable share from them and need not wait for a share, but such messages wait for each other.
    """
    through = now
    for resource in path:
        resource.packets_until = max(now, resource.packets_until) + nbytes / resource.capacity
        through = max(through, resource.packets_until)
    return through


class FlowTable:
    """All active flows. Call `balance` after changes, at the time of the change."""

    def __init__(self) -> None:
        self._dirty: dict[Resource, None] = {}
        self._unlimited: list[Flow] = []

    @property
    def unbalanced(self) -> bool:
        """Whether anything has changed since the last `balance`."""
        return bool(self._dirty or self._unlimited)

    def start(self, flow: Flow, nbytes: float, now: float) -> None:
        """The flow has bytes to carry; its rate is 0 until `balance`."""
        flow.remaining, flow.since, flow.rate = nbytes, now, 0.0
        if not flow.path:
            self._unlimited.append(flow)
        for resource in flow.path:
            resource.flows[flow] = None
            self._dirty[resource] = None

    def follow(self, flow: Flow, nbytes: float, now: float) -> None:
        """The flow has finished, and has more to carry: no rate changes."""
        flow.remaining, flow.since = nbytes, now

    def stop(self, flow: Flow) -> None:
        """The flow carries nothing from now on, whether it has finished or not."""
        flow.rate = flow.remaining = 0.0
        for resource in flow.path:
            if resource.flows.pop(flow, 0) is None:
                self._dirty[resource] = None

    def balance(self, now: float) -> list[Flow]:
        """Give every affected flow its fair rate. Returns the flows whose rate has changed."""
        changed = self._unlimited
        self._unlimited = []
        for flow in changed:
            flow.rate = math.inf
        dirty, self._dirty = self._dirty, {}
        if len(dirty) <= 3:
            alone = _alone(dirty)
            if alone is not None:
                return changed + _settle([(alone, min(resource.capacity for resource in alone.path))], now)
        flows, resources = _component(dirty)
        return changed + _settle(_fair(flows, resources), now)


def _alone(dirty: Iterable[Resource]) -> Flow | None:
    """The only flow that a change affects, if it shares nothing with others: the most frequent case in large networks."""
    only: Flow | None = None
    for resource in dirty:
        if len(resource.flows) > 1:
            return None
        for flow in resource.flows:
            if only is not None and flow is not only:
                return None
            only = flow
    if only is not None and any(len(resource.flows) > 1 for resource in only.path):
        return None
    return only


def _component(dirty: Iterable[Resource]) -> tuple[list[Flow], list[Resource]]:
    """All flows and resources that are connected with these."""
    seen: dict[Resource, None] = dict.fromkeys(dirty)
    flows: dict[Flow, None] = {}
    waiting = list(seen)
    for resource in waiting:
        for flow in resource.flows:
            if flow not in flows:
                flows[flow] = None
                for other in flow.path:
                    if other not in seen:
                        seen[other] = None
                        waiting.append(other)
    return list(flows), [resource for resource in waiting if resource.flows]


def _fair(flows: Sequence[Flow], resources: Sequence[Resource]) -> list[tuple[Flow, float]]:
    """Max-min fair rates: raise the rates of all flows equally; when a resource is full, its flows keep their rate."""
    left = {resource: resource.capacity for resource in resources}
    count = {resource: len(resource.flows) for resource in resources}
    # A resource's share only grows while other resources' flows are settled, so entries in the heap are never too large.
    shares = [(left[resource] / count[resource], number) for number, resource in enumerate(resources)]
    heapq.heapify(shares)
    rates: dict[Flow, float] = {}
    while len(rates) < len(flows):
        share, number = heapq.heappop(shares)
        resource = resources[number]
        if not count[resource]:
            continue
        now = max(0.0, left[resource]) / count[resource]
        if now > share:
            heapq.heappush(shares, (now, number))
            continue
        for flow in resource.flows:
            if flow not in rates:
                rates[flow] = share
                for other in flow.path:
                    left[other] -= share
                    count[other] -= 1
    return list(rates.items())


def _settle(rates: Iterable[tuple[Flow, float]], now: float) -> list[Flow]:
    """Set the new rates. Returns the flows whose rate has changed."""
    changed = []
    for flow, rate in rates:
        if rate != flow.rate:
            flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.since))
            flow.since, flow.rate = now, rate
            changed.append(flow)
    return changed
