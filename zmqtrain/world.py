"""What a process takes from the world that it runs in, beside time and network: the calendar, and randomness that names things.

Model and data randomness come from the job's seed everywhere. But sessions and request numbers must differ between processes that
know nothing of each other, so they come from the operating system; in simulation from the simulation's seed, so that it repeats.
An event loop brings its world along as its attribute ``world``.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Protocol, cast


class World(Protocol):
    """The environment of an event loop that does not run in the real world."""

    one_process: bool
    """Whether all of a run's processes are this one, and so have the same files and modules."""

    def wall_s(self) -> float: ...

    def random_bits(self, bits: int) -> int: ...


class RealWorld:
    """This machine and its real time."""

    one_process = False

    def wall_s(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def random_bits(self, bits: int) -> int:
        """Return ``bits`` random bits that cannot be guessed."""
        return random.SystemRandom().getrandbits(bits)


REAL = RealWorld()


def current_world() -> World:
    """The running event loop's world; the real one outside of any loop."""
    try:
        world = getattr(asyncio.get_running_loop(), "world", None)
    except RuntimeError:
        return REAL
    # Not by isinstance: with a protocol that takes 5 us, for two random numbers of each link.
    return REAL if world is None else cast(World, world)


def wall_s() -> float:
    """Seconds since the epoch, in the running loop's world."""
    return current_world().wall_s()


def random_bits(bits: int) -> int:
    """Return ``bits`` random bits from the running loop's world."""
    return current_world().random_bits(bits)
