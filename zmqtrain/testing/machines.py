"""Test machines for ssh on this machine: network namespaces behind NICs of a given speed, with an sshd in each, and keys that are
used for nothing else. Needs root."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

import zmqtrain
from zmqtrain.launcher.namespaces import Namespaces, NoNamespacesError

PACKAGE_ROOT = Path(zmqtrain.__file__).parent.parent
#: sshd runs as root and uses no account data.
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
    """Several machines. Call ``start()``, and ``close()`` in any case. The caller owns their namespaces."""

    def __init__(self, namespaces: Namespaces, names: Sequence[str], folder: Path) -> None:
        """``folder``: for keys, logs and what runs keep on the machines, which share this machine's disk."""
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
        """The folder for the state of runs."""
        return self.folder / "state"

    def login(self, host: str | None = None) -> str:
        """The ``ssh`` table of a host. ``host``: the address for logging in, if it is not the host's own."""
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
        self.know({name: self.address(name) for name in self.names})
        (self.folder / "sshd_config").write_text(_CONFIGURATION.format(folder=self.folder))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd confines unauthenticated connections there
        for name in self.names:
            self.start_server(name)

    def know(self, addresses: Mapping[str, str]) -> None:
        """Trust the machines at these addresses."""
        public = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        with self.known_hosts.open("a") as file:
            file.write("".join(f"{address} {public}\n" for address in addresses.values()))

    def start_server(self, name: str) -> None:
        server = sshd()
        assert server is not None
        command = self.namespaces.command(name, (server, "-D", "-e", "-f", str(self.folder / "sshd_config")))
        log = self.folder / f"sshd-{name}.log"
        with log.open("ab") as file:
            self._servers[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def break_connections(self, name: str) -> int:
        """Kill the server's processes for open connections, but not the server. Returns their number."""
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


M = TypeVar("M", bound=Machines)


def missing() -> str | None:
    """Why there can be no such machines here; ``None``: they may work."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if sshd() is None or shutil.which("ssh-keygen") is None:
        return "sshd is not installed (package openssh-server)"
    return None


def sshd() -> str | None:
    """The path of the server's program."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def machines(
    count: int, folder: Path, rate: float | None = None, *, kind: Callable[[Namespaces, Sequence[str], Path], M]
) -> Iterator[M]:
    """Several machines, named ``m1`` and so on, whose NICs carry ``rate`` payload bytes per second, each run by a ``kind`` of
    `Machines`. Raises `NoNamespacesError`."""
    why = missing()
    if why is not None:
        raise NoNamespacesError(why)
    names = [f"m{number}" for number in range(1, count + 1)]
    namespaces = Namespaces(dict.fromkeys(names, rate))
    try:
        asyncio.run(namespaces.open())
        made = kind(namespaces, names, folder)
        try:
            made.start()
            yield made
        finally:
            made.close()
    finally:
        asyncio.run(namespaces.close())


def _inline(table: Mapping[str, str]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + " }"
