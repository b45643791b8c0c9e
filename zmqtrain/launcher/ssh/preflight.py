"""The preflight check of all hosts: log in, compare versions, copy the folder, and check that the hosts reach each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from zmqtrain.errors import HostLostError, HostsError, SshError
from zmqtrain.launcher.engine import EngineRun
from zmqtrain.launcher.ssh.inspection import PACKAGES, Fault, faults_of_versions, own_versions, table
from zmqtrain.launcher.ssh.session import Client, Login
from zmqtrain.launcher.ssh.target import Target
from zmqtrain.net.address import split_address
from zmqtrain.topology.schema import Host

#: The most logins at the same time: sshd refuses more than a few that have not authenticated (``MaxStartups``), and jump hosts
#: carry all of them.
MOST_LOGINS = 8
#: In a large cluster, each host tries to reach this many others: those that follow it in the file.
MOST_TRIED = 32
#: Seconds that reaching another host's port may take.
REACH_S = 5.0

#: A check on a host, which adds its faults to the list.
Look: TypeAlias = Callable[[Host, list[Fault]], Awaitable[None]]


class Preflight:
    """What is known about a run's hosts. Each method asks all hosts at once, and raises one error with all faults."""

    def __init__(self, run: EngineRun, client: Client, name: str, target: Callable[[Host], Target]) -> None:
        """``name``: the run's name on its hosts. ``target``: gives the way to log in to a host."""
        self._run, self._client, self._name, self._target = run, client, name, target
        self._by_name = {host.name: host for host in run.hosts}
        self.sessions: dict[str, Login] = {}
        """The logins, by host."""
        self.folders: dict[str, str] = {}
        """The folder at which relative paths begin, by host."""
        self.binds: dict[str, str] = {}
        """The address at which the processes listen, by host."""

    async def log_in(self) -> None:
        """Log in to all hosts."""
        gate = asyncio.Semaphore(MOST_LOGINS)

        async def log_in(host: Host, _faults: list[Fault]) -> None:
            async with gate:
                session = await Login.open(self._client, self._target(host), self._name, connect_s=self._run.timeouts.connect_s)
            self.sessions[host.name] = session

        await self._on_all(log_in)

    async def rooms(self) -> dict[str, tuple[int, int]]:
        """Processors and GPUs that may be used on each host."""
        found: dict[str, tuple[int, int]] = {}

        async def ask(host: Host, _faults: list[Fault]) -> None:
            answer = await self.sessions[host.name].ask("room")
            found[host.name] = max(1, int(answer["processors"])), max(0, int(answer["gpus"]))

        await self._on_all(ask)
        return found

    async def compare(self, files: Sequence[str], *, copied: bool) -> None:
        """Check that hosts have the same Python, zmqtrain and torch as this machine, and the folder with these files, unless it is
        ``copied``."""
        ours = own_versions()

        async def compare(host: Host, faults: list[Fault]) -> None:
            folder = host.folder or str(self._run.folder)
            answer = await self.sessions[host.name].ask(
                "check",
                packages=list(PACKAGES),
                folder=None if copied and host.folder is None else folder,
                files=list(files),
            )
            faults.extend(faults_of_versions(host.name, ours, answer))
            faults.extend(Fault(host.name, str(what), str(remedy)) for what, remedy in answer["faults"])
            self.folders[host.name] = folder

        await self._on_all(compare)

    async def copy(self, packed: bytes) -> None:
        """Copy the folder to all hosts, except those with a folder of their own."""

        async def copy(host: Host, _faults: list[Fault]) -> None:
            if host.folder is not None:
                return
            answer = await self.sessions[host.name].ask("unpack", size=len(packed), data=packed)
            self.folders[host.name] = answer["folder"]

        await self._on_all(copy)

    async def try_ways(self) -> None:
        """Check that each host can listen at its address, and reaches the launcher and the other hosts."""
        ports: dict[str, int] = {}
        within = self._run.topology.job.port_range

        async def listen(host: Host, faults: list[Fault]) -> None:
            bind = host.listens_at
            try:
                answer = await self.sessions[host.name].ask("listen", address=bind, ports=within)
            except HostsError as error:
                if bind != "::" or host.bind is not None:
                    faults.append(_cannot_listen(host, bind, str(error)))
                    return
                bind = "0.0.0.0"  # it is known by name, and has no IPv6
                answer = await self.sessions[host.name].ask("listen", address=bind, ports=within)
            self.binds[host.name], ports[host.name] = bind, int(answer["port"])

        async def reach(host: Host, faults: list[Fault]) -> None:
            address, _, port = split_address(self._run.coordinators[host.name])[0].removeprefix("tcp://").rpartition(":")
            address = address.strip("[]")
            targets = [("", address, int(port))]
            targets += [(name, self._by_name[name].address, ports[name]) for name in next_ones(list(self._by_name), host.name)]
            answer = await self.sessions[host.name].ask("reach", targets=targets, patience_s=REACH_S)
            for name, why in answer["failed"].items():
                faults.append(_no_way(host, self._by_name.get(name), address, str(why)))

        await self._on_all(listen)
        await self._on_all(reach)

    async def _on_all(self, look: Look) -> None:
        """Run a check on all hosts at once. Raises `HostsError` with all faults, or `HostLostError` if a later attempt may
        succeed."""
        faults: list[Fault] = []

        async def one(host: Host) -> None:
            try:
                await look(host, faults)
            except SshError as error:
                faults.append(Fault(host.name, error.reason, error.remedy, passing=not error.lasting))
            except HostsError as error:
                faults.append(Fault(host.name, str(error).removeprefix(f"{host.name}: "), "see the message"))

        async with asyncio.TaskGroup() as group:
            for host in self._run.hosts:
                group.create_task(one(host), name=f"look at {host.name}")
        if faults:
            order = list(self._by_name)
            faults.sort(key=lambda fault: order.index(fault.host))
            text = table(faults, len(order))
            raise HostLostError(text, faults) if all(fault.passing for fault in faults) else HostsError(text, faults)


def next_ones(names: list[str], name: str) -> list[str]:
    """The hosts that one host tries to reach: all others, or of many the next ones in order, so that each is tried equally
    often."""
    place = names.index(name)
    return (names[place + 1 :] + names[:place])[:MOST_TRIED]


def _cannot_listen(host: Host, bind: str, why: str) -> Fault:
    why = why.removeprefix(f"{host.name}: ")
    what = f"cannot listen on {bind} ({why})"
    if host.bind is not None:
        return Fault(host.name, what, "set bind in [[hosts]] to one of the host's own addresses")
    return Fault(host.name, what, 'correct address in [[hosts]]; if it is translated on the way (NAT), add bind = "0.0.0.0"')


def _no_way(host: Host, other: Host | None, launcher: str, why: str) -> Fault:
    if other is None:
        return Fault(
            host.name,
            f"cannot reach the launcher at {launcher} ({why})",
            "open its ports in the firewall, or set [engine] address to an address at which hosts reach this machine",
        )
    return Fault(
        host.name,
        f"cannot reach {other.name} at {other.address} ({why})",
        "open the ports between hosts in the firewall, or give addresses on a network that they share",
    )
