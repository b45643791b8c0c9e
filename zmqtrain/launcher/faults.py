"""Faults in an emulated run: real signals to real processes, and links of this machine that are cut.

The launcher decides when (`zmqtrain.run.injector`), and tells the agents what to do to their roles; agents it starts and signals
itself. Links are cut, and latencies grow, where endpoints send (`zmqtrain.net.paced`), with and without namespaces::

    launcher ---- orders: "signal worker/1 9", "restart worker/1 2.0" ---> agent -> its processes
       ^-------- "3": a worker begins the third step ----------------------- worker
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zmqtrain.errors import ConnectivityError, EngineError, UsageError
from zmqtrain.net.endpoint import PeerId
from zmqtrain.run.faults import Fault, remaining
from zmqtrain.run.injector import Heal, Injector
from zmqtrain.run.side_lines import LineReader, LineWriter, begins_at, orders_for
from zmqtrain.topology.links import links_of

if TYPE_CHECKING:
    from zmqtrain.launcher.fleet import Fleet
    from zmqtrain.membership.description import RunDescription
    from zmqtrain.net.conditions import Conditions
    from zmqtrain.run.agent import Agent
    from zmqtrain.run.assembly import Assembly
    from zmqtrain.topology.placement import Placement, RolePlacement
    from zmqtrain.topology.schema import Topology

#: Called when an agent has ended that was started again: its host, and its exit code.
AgentEnded = Callable[[str, int], None]


def refused(topology: Topology) -> list[str]:
    """Why an emulated run cannot have some of the faults, each as a sentence."""
    found = []
    model = links_of(topology)
    latent = any(way.latency for way in (model.way, *model.ways.values())) or any(host.latency for host in model.hosts.values())
    latent = latent or any(rack.latency for rack in model.racks.values())
    for number, fault in enumerate(topology.faults):
        why = ""
        if fault.kind == "corrupt":
            why = "flips a bit in a message, which TCP's own checksums would find on real links"
        elif fault.kind == "drop":
            why = "breaks connections, which here are the kernel's"
        elif fault.kind == "slow" and topology.compute.device != "modelled":
            why = f'is for modelled devices, and [compute] device is "{topology.compute.device}", which takes the time it needs'
        elif fault.kind == "delay" and not latent:
            found.append(f"faults[{number}]: delay multiplies the latency, and [network] has none: add latency")
        if why:
            found.append(f"faults[{number}]: {fault.kind} {why}: only zmqtrain simulate carries it out")
    return found


# The agent's side -------------------------------------------------------------------------------------------------------------


@contextmanager
def obeyed(agent: Agent, description: RunDescription, shaping: str, host: str) -> Iterator[None]:
    """Within the block the agent of ``host`` does what the launcher orders, if this run has faults. ``shaping``: the file with the
    run's network, or empty."""
    path = orders_for(Path(shaping), host) if shaping else None
    if path is None or not path.exists():
        yield
        return
    with LineReader(path, _Orders(agent, description.placement.of_host(host), f"agent/{host}").take):
        yield


class _Orders:
    def __init__(self, agent: Agent, roles: Sequence[RolePlacement], own: PeerId) -> None:
        self._agent, self._own = agent, own
        self._roles = {role.peer: role for role in roles}

    def take(self, order: str) -> None:
        what, peer, *rest = order.split()
        if what == "restart":
            self._agent.restart(self._roles[peer], float(rest[0]))
        elif peer == self._own:
            os.kill(os.getpid(), int(rest[0]))
        else:
            self._agent.hit(peer, signal.Signals(int(rest[0])))


# The launcher's side ----------------------------------------------------------------------------------------------------------


class EmulatedMachines:
    """Implements `zmqtrain.run.injector.Machines` for the hosts of an emulated run, which are processes of this machine."""

    def __init__(
        self,
        placement: Placement,
        shaping: Path,
        conditions: Conditions,
        fleet: Fleet,
        assembly: Assembly,
        say: Callable[[str], None],
        ended: AgentEnded,
    ) -> None:
        """``shaping``: the file with the run's network; its orders' FIFOs lie beside it. ``say``: prints a line for the user."""
        self._placement, self._conditions = placement, conditions
        self._fleet, self._assembly, self._say, self._ended = fleet, assembly, say, ended
        hosts = [host for host in placement.hosts if placement.of_host(host)]
        self._orders = {host: LineWriter(orders_for(shaping, host)) for host in hosts}
        self._host_of = {role.peer: role.host for role in placement.roles}
        self._paused: set[str] = set()

    def release(self) -> None:
        """Let what still stands go on, so that it can end."""
        for target in sorted(self._paused):
            self._resume(target)
        for line in self._orders.values():
            line.close()

    async def kill(self, target: str) -> None:
        self._signal(target, signal.SIGKILL)

    async def restart(self, target: str, after_s: float) -> None:
        if target in self._host_of:
            self._orders[self._host_of[target]].say(f"restart {target} {after_s!r}")
        elif target in self._orders:
            self._signal_agent(target, signal.SIGKILL)
            await asyncio.sleep(after_s)
            try:
                await self._fleet.start_again(target)
            except EngineError as error:
                self._say(str(error))
                return
            self._ended(target, await self._fleet.wait(target))

    async def join(self, host: str) -> None:
        raise AssertionError("no file has it")

    async def drain(self, host: str) -> None:
        try:
            self._say(await self._assembly.drain(host))
        except (UsageError, ConnectivityError) as error:  # the run needs it, or it was lost before it had left
            self._say(str(error))

    async def shut_down(self, host: str) -> None:
        self._signal_agent(host, signal.SIGTERM)

    async def pause(self, target: str) -> None:
        self._paused.add(target)
        if target in self._orders:
            # The agent stops last, and itself: it must have stopped its roles before.
            for role in self._placement.of_host(target):
                self._signal(role.peer, signal.SIGSTOP)
            self._orders[target].say(f"signal agent/{target} {int(signal.SIGSTOP)}")
        else:
            self._signal(target, signal.SIGSTOP)

    async def resume(self, target: str) -> None:
        self._resume(target)

    def _resume(self, target: str) -> None:
        self._paused.discard(target)
        if target in self._orders:
            self._signal_agent(target, signal.SIGCONT)
            for role in self._placement.of_host(target):
                self._signal(role.peer, signal.SIGCONT)
        else:
            self._signal(target, signal.SIGCONT)

    async def part(self, one: Sequence[str], others: Sequence[str], *, one_way: bool) -> Heal:
        ways = [(a, b) for a in one for b in others]
        if not one_way:
            ways += [(b, a) for a, b in ways]
        await self._add(ways, 1)
        return partial(self._add, ways, -1)

    async def _add(self, ways: Sequence[tuple[str, str]], number: int) -> None:
        """Add ``number`` to the partitions on these ways."""
        for source, target in ways:
            self._conditions.part(source, target, number)

    async def slow(self, target: str, factor: float) -> None:
        self._conditions.slow_down(self._peers(target), factor)

    async def delay(self, target: str, factor: float) -> None:
        self._conditions.delay_more(self._peers(target), factor)

    async def corrupt(self, target: str, to: str | None) -> None:
        raise AssertionError("refused")

    async def drop(self, target: str, to: str | None) -> None:
        raise AssertionError("refused")

    def _peers(self, target: str) -> list[PeerId]:
        if target in self._orders:
            return [*(role.peer for role in self._placement.of_host(target)), f"agent/{target}"]
        return [target] if target in self._host_of else []

    def _signal(self, target: str, number: signal.Signals) -> None:
        """To a role by its agent, to a host's agent itself: its roles end with it. A host may have been left out by a restart."""
        if target in self._orders:
            self._signal_agent(target, number)
        elif target in self._host_of:
            self._orders[self._host_of[target]].say(f"signal {target} {int(number)}")

    def _signal_agent(self, host: str, number: signal.Signals) -> None:
        self._fleet.signal(host, number)


class Injection:
    """The faults of one run, from its beginning to its end or its restart."""

    def __init__(self, machines: EmulatedMachines, faults: Sequence[Fault], shaping: Path, say: Callable[[str], None]) -> None:
        self._machines, self._faults, self._shaping = machines, faults, shaping
        self._injector = Injector(machines, faults, lambda fault: say(f"fault: {fault}"))
        self._began: float | None = None

    async def run(self, running: Callable[[], Awaitable[object]]) -> None:
        """Carry them out, until cancelled. Times count from when ``running()`` returns: all roles have joined."""
        triggers = {fault.trigger for fault in self._faults if fault.step is not None}
        with ExitStack() as stack:
            stack.callback(self._machines.release)
            for peer in triggers:
                path = begins_at(self._shaping, peer)
                if path.exists():
                    stack.enter_context(LineReader(path, lambda text, peer=peer: self._injector.hear(peer, int(text))))  # type: ignore[misc]
            await running()
            self._began = asyncio.get_running_loop().time()
            await self._injector.run()

    def left(self, pause_s: float, hosts: Sequence[str]) -> tuple[Fault, ...]:
        """The faults of the run that begins again in ``pause_s`` seconds, on these hosts."""
        if self._began is None:
            return tuple(self._faults)
        seconds = asyncio.get_running_loop().time() - self._began + pause_s
        return remaining(self._faults, self._injector.done, seconds, hosts)
