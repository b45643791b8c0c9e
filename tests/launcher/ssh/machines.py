"""Machines to log in to, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S
from zmqtrain.launcher.namespaces import NoNamespacesError
from zmqtrain.testing import machines as made_by


class Machines(made_by.Machines):
    """So many machines, ``m1`` and so on."""

    def add_addresses(self, own: str, addresses: dict[str, str]) -> None:
        """Give this machine and the others further addresses, of which ssh knows the keys."""
        self.know(addresses)
        for name, address in addresses.items():
            _ip("-n", self.namespaces.namespace_of(name), "addr", "add", f"{address}/64", "dev", "eth0", "nodad")
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

    @contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """A machine's cable is out for a while."""
        namespace = self.namespaces.namespace_of(name)
        _ip("-n", namespace, "link", "set", "eth0", "down")
        try:
            yield
        finally:
            _ip("-n", namespace, "link", "set", "eth0", "up")

    def left(self) -> list[str]:
        """Command lines of processes that stay in the machines, but for sshd's own; and folders of runs."""
        end = time.monotonic() + PATIENCE_S
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
    try:
        with made_by.machines(count, folder, kind=Machines) as made:
            yield made
    except NoNamespacesError as error:
        pytest.skip(str(error))


def command(*words: str) -> list[str]:
    """A ``zmqtrain`` command."""
    return [sys.executable, "-m", "zmqtrain", *words]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
