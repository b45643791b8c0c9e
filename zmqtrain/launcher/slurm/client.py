"""Steps of a Slurm job as channels: one ``srun`` per node, whose standard streams are the remote program's."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
from dataclasses import dataclass

from zmqtrain.errors import SshError, UsageError
from zmqtrain.launcher.ssh.system_client import SystemConnection, start_client
from zmqtrain.launcher.ssh.target import Target, remote_program, remote_words
from zmqtrain.topology.schema import Host

#: Variables that srun reads as options. They describe the job's own tasks, and must not apply to a step of one task.
_NOT_OURS = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_GPU", "SLURM_NNODES", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK",
    "SLURM_GPUS_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND", "SLURM_LABELIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE",
    "SLURM_STDERRMODE", "SLURM_EXACT", "SLURM_OVERCOMMIT", "SLURM_MULTI_PROG", "SLURM_KILL_BAD_EXIT", "SLURM_WAIT",
)  # fmt: skip
#: Seconds that a step may take to end once it has nothing more to do.
END_S = 5.0


@dataclass(frozen=True, slots=True)
class StepTarget(Target):
    """A node of the job. ``host`` is its name in Slurm."""

    @classmethod
    def on(cls, node: str, host: Host, python: str) -> StepTarget:
        """The target of a host on this node. ``python``: used if the file names none."""
        return cls(name=host.name, host=node, python=host.python or python, environment=host.environment)

    @property
    def way(self) -> str:
        return "the step (srun)"

    @property
    def program(self) -> bytes:
        return remote_program("zmqtrain.launcher.slurm.step")

    @property
    def by_hand(self) -> str:
        return shlex.join([*step_words(self), "true"])


def step_words(target: Target) -> list[str]:
    """``srun`` for a step of one task on a node, in parallel with whatever else the job runs there.

    The step may use everything that the job has on the node, and shares the processors. The words contain no secret."""
    return ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={target.host}", "--cpu-bind=none", "--job-name=zmqtrain"]


class StepClient:
    """Implements `zmqtrain.launcher.ssh.session.Client`."""

    def __init__(self) -> None:
        """Raises `UsageError` if there is no ``srun``."""
        if shutil.which("srun") is None:
            raise UsageError("there is no command srun here: launch on a machine with Slurm's commands")

    async def connect(self, target: Target, connect_s: float) -> StepConnection:
        environ = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
        words = [*step_words(target), *remote_words(target.python)]
        return StepConnection(target, *await start_client(words, environ))


class StepConnection(SystemConnection):
    """The standard streams of an ``srun``. Implements `zmqtrain.launcher.ssh.session.RemoteStreams`."""

    async def ended(self) -> tuple[int | None, str]:
        """As for any connection. Raises `SshError` if Slurm itself did not start the program."""
        status, said = await super().ended()
        if "execve" in said and "No such file" in said:
            return 127, ""
        lines = [line.strip() for line in said.splitlines() if line.strip().startswith("srun: error:")]
        if status and lines and "Exited with exit code" not in lines[0]:
            why = lines[0].removeprefix("srun: error:").strip()
            raise SshError(
                self.target.name, f"Slurm could not start a step there ({why})", f"check that `{self.target.by_hand}` works"
            )
        return status, said

    async def close(self) -> None:
        """Close the streams, on which the program ends; srun reports to Slurm, if it has the time."""
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                async with asyncio.timeout(END_S):
                    await self.process.wait()
            except TimeoutError:
                pass
        await super().close()
