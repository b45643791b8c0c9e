"""The engine that starts nothing: a scheduler starts the nodes, and their agents join by themselves."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from zmqtrain.errors import HostLostError, UsageError
from zmqtrain.launcher.engine import AGENT, EngineRun, Gathered, Gathering, Handle
from zmqtrain.launcher.environment.place import DEFAULT_PORT, NAME, NODE_RANK, NODES, NodePlace, read_place
from zmqtrain.launcher.environment.register import Register
from zmqtrain.launcher.environment.rendezvous import Rendezvous
from zmqtrain.launcher.local import LocalEngine, LocalHandle
from zmqtrain.membership.environment import COORDINATOR_ADDRESS, PEER, TOKEN
from zmqtrain.membership.secret import read_token, run_token, write_token
from zmqtrain.topology.schema import Host, Topology
from zmqtrain.world import random_bits

#: The file in the run directory with the token, if the environment has none. It exists as long as the run.
TOKEN_NAME = "token"


class NodeHandle:
    """Implements `zmqtrain.launcher.engine.Handle`."""

    def __init__(self, host: str, ended: asyncio.Future[int]) -> None:
        self.host, self.ended = host, ended

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)


class EnvironmentEngine:
    """Implements `zmqtrain.launcher.engine.GatheringEngine`."""

    def __init__(self, *, here: bool = False, environ: Mapping[str, str] | None = None) -> None:
        """``here``: this process is on the run's first node, and starts that node's agent itself."""
        self._here = here
        self._environ = os.environ if environ is None else environ
        self._rendezvous: Rendezvous | None = None
        self._own: LocalHandle | None = None
        self._token_file: str | None = None
        self._handles: dict[str, NodeHandle] = {}
        self._run = f"{random_bits(128):032x}"

    async def gather(self, gathering: Gathering) -> Gathered:
        """Listen, and wait until all nodes have joined.

        Raises `HostLostError`, which names the hosts that have not joined, `UsageError` for a wrong environment, and
        `PortInUseError`.
        """
        topology = gathering.topology
        place = read_place(self._environ, together=self._here)
        token = read_token(self._environ)
        if token is None:
            path = gathering.directory / TOKEN_NAME
            token, self._token_file = write_token(path), str(path)
        listed = "hosts" in topology.model_fields_set
        register = Register(topology.hosts if listed else None, place.nodes)
        wait_s = topology.engine.wait
        rendezvous = self._rendezvous = Rendezvous(token, register, say=gathering.say, on_ended=self._ended, wait_s=wait_s)
        port = await rendezvous.open(port_of(topology, place))
        gathering.say(self._waits_for(register, port))
        if self._here:
            self._own = await self._start_own(place, port, token)
        try:
            async with asyncio.timeout(wait_s):
                await self._complete(register, rendezvous)
        except TimeoutError as error:
            raise HostLostError(_too_few_joined(register, rendezvous, port, wait_s)) from error
        settled = register.settle(rendezvous.seen)
        given = topology.engine.address
        towards = settled.towards if given is None else dict.fromkeys(settled.towards, given)
        return Gathered(topology.with_hosts(settled.hosts), towards, run_token(token, self._run))

    async def open(self, run: EngineRun) -> None:
        """All hosts have joined already. Hosts without roles may leave."""
        assert self._rendezvous is not None
        busy = {host.name for host in run.hosts}
        await self._rendezvous.dismiss([host.name for host in run.topology.hosts if host.name not in busy])

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> Handle:
        """Tell the host's waiting agent to begin. The token is not sent, since the node can compute it."""
        assert self._rendezvous is not None
        handle = self._handles[host.name] = NodeHandle(host.name, asyncio.get_running_loop().create_future())
        variables = {name: value for name, value in environ.items() if name != TOKEN}
        start = {"run": self._run, "variables": variables, "environment": dict(host.environment), "folder": host.folder}
        await self._rendezvous.start(host.name, start)
        return handle

    async def stop(self, handle: Handle, grace: float) -> None:
        """End the agent, if it is still running. An agent that cannot be reached ends by itself when it no longer hears from the
        launcher."""
        assert isinstance(handle, NodeHandle)
        assert self._rendezvous is not None
        node = self._rendezvous.node(handle.host)
        if node is None or handle.ended.done():
            return
        await node.tell(stop=grace)
        try:
            async with asyncio.timeout(max(grace, 1.0)):
                await node.gone.wait()
        except TimeoutError:
            await node.tell(stop=0)

    async def close(self) -> None:
        """Close the rendezvous, and end this node's own agent."""
        if self._rendezvous is not None:
            await self._rendezvous.close()
        if self._own is not None:
            await LocalEngine().stop(self._own, 1.0)
        if self._token_file is not None:
            os.unlink(self._token_file)
            self._token_file = None
        for handle in self._handles.values():
            handle.ended.cancel()

    def _ended(self, host: str, code: int) -> None:
        handle = self._handles.get(host)
        if handle is not None and not handle.ended.done():
            handle.ended.set_result(code)

    async def _complete(self, register: Register, rendezvous: Rendezvous) -> None:
        """Wait until all hosts have joined. Raises `UsageError` if this node's own agent ends before that."""
        own = None if self._own is None else asyncio.create_task(self._own.wait(), name="this node's own agent")
        try:
            while not register.is_complete:
                rendezvous.changed.clear()
                changed = asyncio.create_task(rendezvous.changed.wait(), name="a node joins or leaves")
                try:
                    await asyncio.wait([changed, *([own] if own is not None else [])], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                if own is not None and own.done():
                    raise UsageError(
                        f"this node's own agent ended with exit code {own.result()} before the run began: see its output above"
                    )
        finally:
            if own is not None:
                own.cancel()

    async def _start_own(self, place: NodePlace, port: int, token: str) -> LocalHandle:
        variables = {COORDINATOR_ADDRESS: f"127.0.0.1:{port}", TOKEN: token, PEER: ""}
        if place.names:
            variables[NAME] = place.names[0]
        command = (sys.executable, *AGENT)
        return await LocalEngine().start(Host(name="first"), command, {**self._environ, **variables})

    def _waits_for(self, register: Register, port: int) -> str:
        if self._here:
            return f"waiting for {register.missing()} at port {port}"
        secret = (
            "the launcher's token" if self._token_file is None else f"a copy of {self._token_file}, ZMQTRAIN_TOKEN_FILE its path"
        )
        needs = f"with {COORDINATOR_ADDRESS} set to this machine's address and port {port}, and {secret}"
        return f"waiting for {register.missing()}: run `zmqtrain agent` on each, {needs}"


def port_of(topology: Topology, place: NodePlace) -> int:
    """The port on which the launcher listens: that of the file, or else of the environment."""
    return topology.job.port or place.port or DEFAULT_PORT


def _too_few_joined(register: Register, rendezvous: Rendezvous, port: int, wait_s: float) -> str:
    here = f" ({', '.join(register.here[:8])} joined)" if register.here else ""
    lines = [f"these hosts did not join within {wait_s:g} s at port {port}: {register.missing()}{here}"]
    lines += [f"  refused: {reason}" for reason in rendezvous.refused[:8]]
    lines += [
        "  each node must run `zmqtrain agent` with an environment that says",
        f"    where the launcher is: {COORDINATOR_ADDRESS}=HOST:{port} (or MASTER_ADDR and MASTER_PORT, or what Slurm, Kubeflow, a "
        "JobSet or SkyPilot set)",
        "    which token the run has: ZMQTRAIN_TOKEN, or ZMQTRAIN_TOKEN_FILE",
    ]
    if register.expected is None:
        lines.append(f"    how many nodes there are: {NODES}, unless [[hosts]] lists them")
    else:
        lines.append(f"    which host it is, unless that does not matter: {NAME} or {NODE_RANK}")
    lines.append("  if the nodes only need longer to start, raise [engine] wait")
    return "\n".join(lines)
