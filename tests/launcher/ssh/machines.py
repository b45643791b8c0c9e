"""Machines to log in to, for tests: network namespaces of this one, with an sshd in each, and keys for nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import zmqtrain
from zmqtrain.launcher.namespaces import Namespaces, NoNamespacesError

_PATIENCE_S = 5.0
PACKAGE_ROOT = Path(zmqtrain.__file__).parent.parent
#: sshd runs as root and looks nobody up.
_CONFIGURATION = """
Port 22
ListenAddress 0.0.0.0
ListenAddress ::
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
MaxStartups 50
"""


class Machines:
    """So many machines, ``m1`` and so on."""

    def __init__(self, namespaces: Namespaces, names: Sequence[str], folder: Path) -> None:
        self.names, self.folder = list(names), folder
        self.namespaces = namespaces
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def address(self, name: str) -> str:
        return self.namespaces.address_of(name)

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def key(self) -> Path:
        return self.folder / "key"

    @property
    def state(self) -> Path:
        """Where runs have their folders: the machines share this one's disk."""
        return self.folder / "state"

    def login(self, host: str | None = None) -> str:
        """``ssh`` of a host. ``host``: where to log in, where that is not its address."""
        options = {"IdentityFile": str(self.key), "IdentitiesOnly": "yes", "UserKnownHostsFile": str(self.known_hosts)}
        there = "" if host is None else f"host = {json.dumps(host)}, "
        return f"{{ {there}options = {_inline(options)} }}"

    def hosts(self, *names: str, environment: dict[str, str] | None = None, **more: str) -> str:
        """``[[hosts]]`` of a topology file. ``more``: further lines, as TOML."""
        variables = {"XDG_STATE_HOME": str(self.state), "PYTHONPATH": str(PACKAGE_ROOT), **(environment or {})}
        entries = []
        for name in names or self.names:
            lines = {
                "name": json.dumps(name),
                "address": json.dumps(self.address(name)),
                "slots": "1",
                "environment": _inline(variables),
                "ssh": self.login(),
                **more,
            }
            entries.append("\n".join(["[[hosts]]", *(f"{key} = {value}" for key, value in lines.items())]))
        return "\n\n".join(entries) + "\n"

    def start(self) -> None:
        """Make keys, and start the servers."""
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        shutil.copy(self.folder / "key.pub", self.folder / "authorized_keys")
        public = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        self.known_hosts.write_text("".join(f"{self.address(name)} {public}\n" for name in self.names))
        (self.folder / "sshd_config").write_text(_CONFIGURATION.format(folder=self.folder))
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd locks up what has not logged in yet
        for name in self.names:
            self.start_server(name)

    def add_addresses(self, own: str, addresses: dict[str, str]) -> None:
        """Give this machine and the others further addresses, of which ssh knows the keys."""
        public = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        for name, address in addresses.items():
            _ip("-n", self.namespaces.namespace_of(name), "addr", "add", f"{address}/64", "dev", "eth0", "nodad")
            with self.known_hosts.open("a") as file:
                file.write(f"{address} {public}\n")
        _ip("addr", "add", f"{own}/64", "dev", f"zt{os.getpid()}", "nodad")

    @contextmanager
    def outer_address(self, name: str, address: str) -> Iterator[None]:
        """A machine is found at an address that no interface of its has, as where addresses are translated on the way."""
        namespaces = [self.namespaces.namespace_of(other) for other in self.names if other != name]
        way = ("route", "add", address, "via", self.address(name))
        _ip("-n", self.namespaces.namespace_of(name), "route", "add", "local", address, "dev", "lo")
        for namespace in namespaces:
            _ip("-n", namespace, *way)
        _ip(*way)
        try:
            yield
        finally:
            _ip("route", "del", address)
            for namespace in namespaces:
                _ip("-n", namespace, "route", "del", address)
            _ip("-n", self.namespaces.namespace_of(name), "route", "del", "local", address, "dev", "lo")

    @contextmanager
    def cut_off(self, name: str, address: str) -> Iterator[None]:
        """A machine has no way to an address for a while."""
        namespace = self.namespaces.namespace_of(name)
        _ip("-n", namespace, "route", "add", "unreachable", address)
        try:
            yield
        finally:
            _ip("-n", namespace, "route", "del", "unreachable", address)

    def start_server(self, name: str) -> None:
        server = _sshd()
        assert server is not None
        command = self.namespaces.command(name, (server, "-D", "-e", "-f", str(self.folder / "sshd_config")))
        log = self.folder / f"sshd-{name}.log"
        with log.open("ab") as file:
            self._servers[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def break_connections(self, name: str) -> int:
        """Kill the server's processes for those who have logged in, not the server. How many there were."""
        children = psutil.Process(self._servers[name].pid).children()
        for child in children:
            child.kill()
        return len(children)

    def stop_server(self, name: str) -> None:
        server = self._servers.pop(name)
        for process in [*psutil.Process(server.pid).children(), server]:
            process.kill()
        server.wait()

    def close(self) -> None:
        for name in list(self._servers):
            self.stop_server(name)

    def left(self) -> list[str]:
        """Command lines of processes that stay in the machines, but for sshd's own; and folders of runs."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            processes = [process for name in self.names for process in self.processes(name)]
            if not processes or time.monotonic() > end:
                break
            psutil.wait_procs(processes, timeout=0.1)  # whoever has logged in notices that the other side is gone
        return [*(" ".join(process.cmdline()) for process in processes), *map(str, self.state.glob("zmqtrain/runs/*"))]

    def processes(self, name: str) -> list[psutil.Process]:
        """The processes in a machine, but for sshd's own."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespaces.namespace_of(name)], capture_output=True, text=True, check=True
        )
        found = []
        for number in listed.stdout.split():
            try:
                process = psutil.Process(int(number))
                if process.name() != "sshd" and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found


@contextmanager
def machines(count: int, folder: Path) -> Iterator[Machines]:
    """So many machines. Skips the test where they cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    if _sshd() is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd here (package openssh-server)")
    names = [f"m{number}" for number in range(1, count + 1)]
    namespaces = Namespaces(dict.fromkeys(names))
    try:
        try:
            asyncio.run(namespaces.open())
        except NoNamespacesError as error:
            pytest.skip(f"no network namespaces: {error}")
        made = Machines(namespaces, names, folder)
        try:
            made.start()
            yield made
        finally:
            made.close()
    finally:
        asyncio.run(namespaces.close())


def command(*words: str) -> list[str]:
    """A ``zmqtrain`` command."""
    return [sys.executable, "-m", "zmqtrain", *words]


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _inline(table: dict[str, str]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + " }"
