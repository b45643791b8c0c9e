"""The simulated machines of one run: their processes, and their current computing speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zmqtrain.net.endpoint import PeerId
from zmqtrain.simulate.memory import HostMemory
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.simulate.process import Process
from zmqtrain.topology.placement import Placement

if TYPE_CHECKING:
    from zmqtrain.simulate.host import SimulatedHost


class Cluster:
    """The target of faults. Names are roles (``worker/1``), or hosts, which mean all their processes."""

    def __init__(self, network: SimulatedNetwork, placement: Placement, slowdowns: Mapping[str, float] | None = None) -> None:
        """``slowdowns``: the factor on the computing time of each host's modelled devices, if it is not 1."""
        self.network = network
        self.placement = placement
        self.processes: dict[PeerId, Process] = {}
        self.hosts: dict[str, SimulatedHost] = {}
        self._memories: dict[str, HostMemory] = {}
        self._slow: dict[PeerId, float] = {
            role.peer: (slowdowns or {}).get(role.host, 1.0) for role in (*placement.roles, *placement.spares)
        }

    def peers(self, name: str) -> tuple[PeerId, ...]:
        """The roles of a host and its agent; or the role itself."""
        if name in self.placement.hosts or self.placement.of_host(name):
            return (*(role.peer for role in self.placement.of_host(name)), f"agent/{name}")
        return (name,)

    def memory(self, host: str) -> HostMemory:
        """The memory that the processes of this host share."""
        if host not in self._memories:
            self._memories[host] = HostMemory(host, self.network)
        return self._memories[host]

    def slowdown(self, peer: PeerId) -> float:
        """The factor on the time of computing that begins there now."""
        return self._slow[peer]

    def slow_down(self, peer: PeerId, factor: float) -> None:
        """Multiply that factor by ``factor`` (below 1: faster)."""
        if peer in self._slow:
            self._slow[peer] *= factor

    def pause(self, peer: PeerId) -> None:
        """Stop the process, as SIGSTOP would; nothing happens if there is none."""
        process = self.processes.get(peer)
        if process is not None and process.tasks and not process.killed:
            self.network.pause(peer)
            process.pause()

    def resume(self, peer: PeerId) -> None:
        """Continue the process, as SIGCONT would."""
        process = self.processes.get(peer)
        if process is not None:
            process.resume()
            self.network.resume(peer)

    async def kill(self, peer: PeerId, *, silent: bool = False) -> None:
        """Kill the process, as SIGKILL would: it sends nothing more, and its connections break. ``silent``: its machine is gone,
        too, so that connections seem to exist until heartbeats fail."""
        process = self.processes.get(peer)
        if process is not None and process.tasks and not process.killed:
            self.network.kill(peer, silent=silent)
            if process.host:
                self.memory(process.host).lose(peer)
            await process.kill()
