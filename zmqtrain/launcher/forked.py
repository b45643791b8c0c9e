"""The real processes of a host: forked by a fork server, with their output and error reports read from pipes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zmqtrain.launcher.output import OutputReader
from zmqtrain.membership.environment import rank_variables

if TYPE_CHECKING:
    from zmqtrain.arena import Region
    from zmqtrain.launcher.forkserver import Child, ForkServer
    from zmqtrain.membership.description import RunDescription
    from zmqtrain.membership.environment import RoleEnvironment
    from zmqtrain.topology.placement import RolePlacement

#: The largest report in bytes: a traceback and a few words.
LARGEST_REPORT = 1 << 20


class ForkedProcess:
    """Implements `zmqtrain.run.agent.RoleProcess`."""

    def __init__(self, child: Child, output: OutputReader, report: int) -> None:
        """Takes over ``report``, the reading end of the pipe for the error report."""
        self._child, self._output = child, output
        self._report: int | None = report

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exited(self) -> asyncio.Future[int]:
        return self._child.exited

    def signal(self, number: signal.Signals) -> None:
        self._child.signal(number)

    async def flush(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._output.ended.wait()
        except TimeoutError:
            pass

    def report(self) -> Mapping[str, Any] | None:
        return None if self._report is None else _read_report(self._report)

    def close(self) -> None:
        self._output.close()
        if self._report is not None:
            os.close(self._report)
            self._report = None


class ForkedProcesses:
    """Implements `zmqtrain.run.agent.Processes` for one host."""

    def __init__(self, forks: ForkServer, description: RunDescription, region: Region | None) -> None:
        """``region``: the memory that the host's roles share; ``None``: they share none."""
        self._forks, self._description, self._region = forks, description, region
        self._preloading, self._preloaded = asyncio.Lock(), False

    async def start(self, role: RolePlacement, environment: RoleEnvironment, printed: Callable[[str], None]) -> ForkedProcess:
        await self._preload(role.host)
        report_read, report_write = os.pipe()
        output_read, output_write = os.pipe()
        output = OutputReader(output_read, printed)
        try:
            child = await self._forks.start(self.environ(role, environment), output_write, report_write)
        except BaseException:
            output.close()
            os.close(report_read)
            raise
        finally:
            os.close(output_write)
            os.close(report_write)
        return ForkedProcess(child, output, report_read)

    async def _preload(self, host: str) -> None:
        """Import what the file says, before the first role. Raises `UsageError` if that cannot be shared."""
        async with self._preloading:
            modules = self._description.topology.job.preload
            if modules and not self._preloaded:
                # Libraries for arithmetic read how many threads they may use when they are loaded. OpenBLAS starts them then.
                roles = self._description.placement.of_host(host)
                threads = max((role.threads for role in roles if role.kind == "worker"), default=1)
                given = {**self._given(host), "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}
                await self._forks.preload(modules, self._folders(host), given, self._description.topology.job.seed)
                self._preloaded = True

    def _given(self, host: str) -> Mapping[str, str]:
        """The variables that the file sets on a host."""
        return next((each.environment for each in self._description.topology.hosts if each.name == host), {})

    def _folders(self, host: str) -> list[str]:
        """Where roles look for modules first. A role is forked, and does not read PYTHONPATH as it begins."""
        folders = [*self._description.topology.job.python_path, *self._given(host).get("PYTHONPATH", "").split(os.pathsep)]
        return [folder for folder in folders if folder]

    def environ(self, role: RolePlacement, environment: RoleEnvironment) -> dict[str, str]:
        """The variables that a role's process has besides those of its agent."""
        description = self._description
        if self._region is not None:  # its slot there is its number among the host's roles
            slot = description.placement.of_host(role.host).index(role)
            environment = replace(environment, arena=self._region.path, slot=slot)
        master = description.placement.workers[0].host
        address = next(host.address for host in description.topology.hosts if host.name == master)
        # MASTER_PORT is for torch.distributed in the user's script; zmqtrain does not listen there.
        port = 20_000 + int.from_bytes(environment.token.encode()[:2]) % 10_000
        variables = {
            **self._given(role.host),
            **environment.to_environ(),
            **rank_variables(role, description.placement, address, port),
            "OMP_NUM_THREADS": str(role.threads),
            "ZMQTRAIN_PYTHON_PATH": os.pathsep.join(self._folders(role.host)),
        }
        if description.data_path is not None:
            variables["ZMQTRAIN_DATA"] = description.data_path
        if description.script:
            variables["ZMQTRAIN_SCRIPT"] = json.dumps(description.script)
            variables["ZMQTRAIN_SEED"] = str(description.topology.job.seed)
        return variables


def _read_report(file: int) -> Mapping[str, Any] | None:
    """The report that the ended process has written; ``None`` if there is none, or if it cannot be read."""
    os.set_blocking(file, False)
    data = b""
    try:
        while len(data) < LARGEST_REPORT and (more := os.read(file, 65536)):
            data += more
    except BlockingIOError:
        pass
    try:
        report = json.loads(data)
    except ValueError:
        return None
    return report if isinstance(report, dict) else None
