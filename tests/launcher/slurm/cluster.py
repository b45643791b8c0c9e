"""A real Slurm for tests: its controller, and two nodes that are network namespaces of this machine, in a folder of their own."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S
from zmqtrain.launcher.namespaces import Namespaces, NoNamespacesError

NODES = ("n1", "n2")
CPUS = 2
_CONFIGURATION = """
ClusterName=trial
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
KillWait=8
WaitTime=0
PluginDir={plugins}
{nodes}
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A controller, two nodes of two processors, and what to run Slurm's commands with. Make it by `cluster`."""

    def __init__(self, namespaces: Namespaces, folder: Path) -> None:
        self.folder = folder
        self._namespaces = namespaces
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def configuration(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def environ(self) -> dict[str, str]:
        """For commands that are to find this Slurm."""
        return {**os.environ, "SLURM_CONF": str(self.configuration)}

    def address(self, node: str) -> str:
        return self._namespaces.address_of(node)

    def start(self) -> None:
        """Start the daemons, and wait until both nodes take jobs."""
        folder = self.folder
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        (folder / "state").mkdir()
        port = _free_port()
        size = f"CPUs={CPUS} CoresPerSocket={CPUS}"
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={node} NodeAddr={self.address(node)} Port={port + 1} {size} State=UNKNOWN"
            for node in NODES
        )
        text = _CONFIGURATION.format(
            host=socket.gethostname(), address=self._namespaces.address, port=port, folder=folder, nodes=nodes, plugins=_plugins()
        )
        self.configuration.write_text(text)
        munged = ("munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket")
        munged += (f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed", f"--log-file={folder}/munged.log")
        self._start(munged)
        self._until("munged", (folder / "munge.socket").exists)
        self._start(("slurmctld", "-D", "-f", str(self.configuration)))
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
            # Not `ip netns exec`, which hides the control groups that slurmd looks for.
            enter = ("nsenter", f"--net=/run/netns/{self._namespaces.namespace_of(node)}")
            self._start((*enter, _found("slurmd"), "-D", "-N", node, "-f", str(self.configuration)))
        self._until("Slurm", lambda: self.command("sinfo", "-h", "-o", "%T %D").stdout.strip() == "idle 2")

    def command(
        self, *words: str, more: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm to its end."""
        return subprocess.run(
            words, env={**self.environ, **(more or {})}, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S
        )

    def job(self, number: str) -> dict[str, str]:
        """What ``scontrol show job`` says of a job."""
        words = self.command("scontrol", "show", "job", number).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until_job(self, number: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states."""
        self._until(f"job {number} {states}", lambda: self.job(number).get("JobState") in states)
        return self.job(number)

    def processes(self) -> list[psutil.Process]:
        """What runs in the nodes, but for Slurm's own."""
        found = []
        for process in self._all():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if not process.name().startswith(("slurmd", "slurmstepd")):
                    found.append(process)
        return found

    def left(self) -> list[str]:
        """Command lines of what stays in the nodes."""
        end = time.monotonic() + PATIENCE_S / 4
        while (processes := self.processes()) and time.monotonic() < end:
            psutil.wait_procs(processes, timeout=0.2)
        left = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                left.append(" ".join(process.cmdline()))
        return left

    def close(self) -> None:
        """End all daemons, and whatever they have started."""
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()
        end = time.monotonic() + PATIENCE_S
        while (processes := self._all()) and time.monotonic() < end:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=0.2)

    def _all(self) -> list[psutil.Process]:
        """Whatever runs in the nodes."""
        found = []
        for node in NODES:
            listed = subprocess.run(
                ["ip", "netns", "pids", self._namespaces.namespace_of(node)], capture_output=True, text=True, check=True
            )
            for number in listed.stdout.split():
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(int(number))
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def _start(self, command: tuple[str, ...]) -> None:
        log = (self.folder / f"{Path(command[0]).name}.out").open("ab")
        with log:
            self._daemons.append(
                subprocess.Popen(
                    [_found(command[0]), *command[1:]],
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _until(self, what: str, happens: object) -> None:
        assert callable(happens)
        end = time.monotonic() + PATIENCE_S
        while not happens():
            logs = {path.name: path.read_text()[-800:] for path in self.folder.glob("*.log")}
            assert time.monotonic() < end, f"{what} does not come: {logs}"
            time.sleep(0.2)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster. Skips the test where it cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("only root may start Slurm with nodes in network namespaces")
    missing = [name for name in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(name, path=_PATH) is None]
    if missing:
        pytest.skip(f"there is no {', '.join(missing)} here (packages slurm-wlm and munge)")
    namespaces = Namespaces(dict.fromkeys(NODES))
    try:
        try:
            asyncio.run(namespaces.open())
        except NoNamespacesError as error:
            pytest.skip(f"no network namespaces: {error}")
        made = Cluster(namespaces, folder)
        try:
            made.start()
            yield made
        finally:
            made.close()
    finally:
        asyncio.run(namespaces.close())


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"


def _found(name: str) -> str:
    found = shutil.which(name, path=_PATH)
    assert found is not None
    return found


def _plugins() -> str:
    """Slurm looks for its plug-ins where it was built for; Debian has them elsewhere on some machines."""
    folders = [*Path("/usr/lib").glob("*/slurm-wlm"), *Path("/usr/lib").glob("slurm*")]
    return str(folders[0])


def _free_port() -> int:
    """Of two free ones, the first."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return port
