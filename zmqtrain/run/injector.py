"""Injects faults at their times and steps: when, in which order, and what ends with a fault. `Machines` are what they happen to.

::

    injector = Injector(machines, faults)
    ...                                             # `injector.hear(peer, step)` at each step that a worker begins
    await injector.run()                            # until cancelled; times count from here
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

from zmqtrain.net.endpoint import PeerId
from zmqtrain.run.faults import RESTART_S, Fault

#: Ends a partition.
Heal: TypeAlias = Callable[[], Awaitable[None]]


class Machines(Protocol):
    """What can happen to the machines of a run. Worlds differ in it: simulated machines (`zmqtrain.simulate.inject`), or processes
    and links of this machine (`zmqtrain.launcher.faults`). A target is a role, or a host, which means all its processes."""

    async def kill(self, target: str) -> None:
        """End its processes without notice."""

    async def restart(self, target: str, after_s: float) -> None:
        """The same, and later another process takes the name of the role; or the machine is there again, and starts its roles."""

    async def join(self, host: str) -> None:
        """A machine that was not there before takes part."""

    async def drain(self, host: str) -> None:
        """The host is asked to leave. Returns when it has left, or stays."""

    async def shut_down(self, host: str) -> None:
        """The host's agent is told to end."""

    async def pause(self, target: str) -> None:
        """Stop its processes, as SIGSTOP does."""

    async def resume(self, target: str) -> None:
        """Continue them."""

    async def part(self, one: Sequence[str], others: Sequence[str], *, one_way: bool) -> Heal:
        """Let nothing through from the hosts ``one`` to ``others``, nor (unless ``one_way``) back. Returns what ends that."""

    async def slow(self, target: str, factor: float) -> None:
        """Multiply the time that modelled computing takes there."""

    async def delay(self, target: str, factor: float) -> None:
        """Multiply the latency of what is sent from there."""

    async def corrupt(self, target: str, to: str | None) -> None:
        """Flip a bit of the next message from there."""

    async def drop(self, target: str, to: str | None) -> None:
        """Break its connections, which come back."""


class Injector:
    """Carries out a schedule. `run` it as a task; `hear` reports the workers' progress."""

    def __init__(self, machines: Machines, faults: Sequence[Fault], begun: Callable[[Fault], None] | None = None) -> None:
        """``begun(fault)`` is called when a fault begins."""
        self._machines, self._on_begun = machines, begun
        self._by_time = sorted((fault for fault in faults if fault.at is not None), key=lambda fault: fault.at or 0.0)
        self._by_step = [fault for fault in faults if fault.step is not None]
        self._begun: asyncio.Queue[Fault] = asyncio.Queue()
        self._heal: list[Heal] = []
        self._tasks: asyncio.TaskGroup | None = None
        self.done: list[Fault] = []
        """The faults injected so far."""

    def hear(self, peer: PeerId, step: int) -> None:
        """A worker begins a step."""
        due = [fault for fault in self._by_step if fault.trigger == peer and fault.step == step]
        for fault in due:
            self._by_step.remove(fault)
            self._begun.put_nowait(fault)

    async def run(self) -> None:
        """Carry out the faults at their times, which count from now, until cancelled."""
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._follow_clock(began))
            while True:
                self._tasks.create_task(self._inject(await self._begun.get()))

    async def _follow_clock(self, began: float) -> None:
        loop = asyncio.get_running_loop()
        assert self._tasks is not None
        for fault in self._by_time:
            await asyncio.sleep(began + (fault.at or 0.0) - loop.time())
            self._tasks.create_task(self._inject(fault))

    async def _inject(self, fault: Fault) -> None:
        self.done.append(fault)
        if self._on_begun is not None:
            self._on_begun(fault)
        if fault.kind == "partition":
            await self._part(fault)
        elif fault.kind == "heal":
            heals, self._heal = self._heal, []
            for heal in heals:
                await heal()
        else:
            assert fault.target is not None
            await self._hit(fault, fault.target)

    async def _hit(self, fault: Fault, target: str) -> None:
        """What happens to one role or host."""
        machines = self._machines
        match fault.kind:
            case "kill":
                await machines.kill(target)
            case "restart":
                await machines.restart(target, RESTART_S if fault.lasts is None else fault.lasts)
            case "join":
                await machines.join(target)
            case "drain":
                await machines.drain(target)
            case "shutdown":
                await machines.shut_down(target)
            case "pause":
                await machines.pause(target)
                if fault.lasts is not None:
                    await asyncio.sleep(fault.lasts)
                    await machines.resume(target)
            case "slow":
                await machines.slow(target, fault.factor)
                if fault.lasts is not None:
                    await asyncio.sleep(fault.lasts)
                    await machines.slow(target, 1 / fault.factor)
            case "delay":
                await machines.delay(target, fault.factor)
                if fault.lasts is not None:
                    await asyncio.sleep(fault.lasts)
                    await machines.delay(target, 1 / fault.factor)
            case "corrupt":
                await machines.corrupt(target, fault.to)
            case _:
                await machines.drop(target, fault.to)

    async def _part(self, fault: Fault) -> None:
        heals = []
        first = fault.sides[:1] if fault.one_way else fault.sides[:-1]
        for number, side in enumerate(first):
            others = [host for later in fault.sides[number + 1 :] for host in later]
            heals.append(await self._machines.part(side, others, one_way=fault.one_way))
        self._heal += heals
        if fault.lasts is not None:
            await asyncio.sleep(fault.lasts)
            for heal in heals:
                if heal in self._heal:
                    self._heal.remove(heal)
                    await heal()
