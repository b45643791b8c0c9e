"""Hosts as Linux network namespaces: each with a network of its own, connected by a bridge and limited to the NIC's bandwidth.

A run's names begin with ``zt`` and the launcher's process number, so the next run can remove what a killed one has left. The
bridge is in a namespace of its own, where the machine's firewall does not see its traffic; one veth pair connects it to the
launcher.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain

from zmqtrain.net.zeromq import URGENT_TOS

log = logging.getLogger(__name__)

#: The size of a full Ethernet frame, and of its payload: without the headers of Ethernet (14), IP (20) and TCP with time stamps
#: (32). ``tc`` counts the former, our figures are of the latter.
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
#: The burst that passes at once after a pause, and the queue: each in seconds at the full rate, with a minimum in bytes.
BURST_S, LEAST_BURST_BYTES = 0.002, 16 * 1024
#: What a class may send in its turn; there is one class of each priority, so one packet of the kernel is enough.
QUANTUM_BYTES = 64 * 1024
QUEUE_S, LEAST_QUEUE_BYTES = 0.05, 256 * 1024
#: What a connection may have in a queue. A path without delay needs little, and then a few connections never overflow the queue:
#: TCP waits for 200 ms after a loss of the last packets, however slow the run's own clock is.
WINDOW_S, LEAST_WINDOW_BYTES = 0.004, 128 * 1024
#: TCP hands its packets over in lumps, which urgent messages and acknowledgements wait for: their length in seconds at the rate.
LUMP_S, LEAST_LUMP_BYTES, MOST_LUMP_BYTES = 0.0005, 4 * 1024, 64 * 1024
#: Available in every kernel; on a path without delay it fills the NIC, while BBR, the default of some machines, stays a few
#: percent below.
CONGESTION_CONTROL = "reno"
#: The most hosts of a run: a /22 network, with one address for the launcher.
MOST_HOSTS = 1000
#: Addresses reserved for benchmarks, which are not routed (RFC 2544); a run takes one of 128 parts.
_NETWORK = "198.{}.{}.{}"
_PARTS = 128
_OWNED = re.compile(r"^zt(\d+)(?:-|$)")
_PATIENCE_S = 30.0
_CLONE_NEWNET = 0x40000000


class NoNamespacesError(Exception):
    """Namespaces cannot be used here; the message says why."""


class Namespaces:
    """One run's namespaces: ``await open()``, and ``await close()`` in any case."""

    def __init__(self, rates: Mapping[str, float | None]) -> None:
        """``rates``: for each host, payload bytes per second in each direction; ``None``: no limit."""
        self._rates = rates
        self._name = f"zt{os.getpid()}"
        self._numbers = {host: number for number, host in enumerate(rates)}
        self._part = 0
        self._opened = False

    @property
    def address(self) -> str:
        """The launcher's address for the hosts."""
        return self._address(0)

    def address_of(self, host: str) -> str:
        return self._address(self._numbers[host] + 1)

    def command(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        """The command with a prefix that runs it in the host's namespace (in the process that is started, not in a child of it)."""
        return in_namespace(self.namespace_of(host), command)

    def namespace_of(self, host: str) -> str:
        """The name of the host's namespace, for `in_namespace` and `enter_namespace`."""
        return f"{self._name}-{self._numbers[host]}"

    async def open(self) -> None:
        """Make the namespaces. Raises `NoNamespacesError`; call `close` in that case, too."""
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise NoNamespacesError(f"there is no {' and no '.join(missing)} here (package iproute2)")
        if os.geteuid() != 0:
            raise NoNamespacesError("only root may make network namespaces")
        if len(self._rates) > MOST_HOSTS:
            raise NoNamespacesError(f"{len(self._rates)} hosts are too many for namespaces ({MOST_HOSTS} at most)")
        await self._remove_leftovers()
        self._part = await self._free_part()
        self._opened = True
        bridge = f"{self._name}-net"
        await _batch("ip", [f"netns add {bridge}", *(f"netns add {self.namespace_of(host)}" for host in self._rates)])
        # All veth pairs begin in the bridge's namespace, so that they are removed with it.
        await _batch(
            "ip",
            [
                "link add br0 type bridge",
                "link set br0 up",
                f"link add c0 type veth peer name {self._name} netns {os.getpid()}",
                *(
                    f"link add c{n + 1} type veth peer name eth0 netns {self.namespace_of(host)}"
                    for host, n in self._numbers.items()
                ),
                *chain.from_iterable((f"link set c{n} master br0", f"link set c{n} up") for n in range(len(self._rates) + 1)),
            ],
            "-n",
            bridge,
        )
        await _batch("ip", [f"addr add {self.address}/22 dev {self._name}", f"link set {self._name} up"])
        for host in self._rates:
            lines = ["link set lo up", f"addr add {self.address_of(host)}/22 dev eth0", "link set eth0 up"]
            await _batch("ip", lines, "-n", self.namespace_of(host))
            with suppress(NoNamespacesError):  # otherwise the machine's default stays
                await _run(*self.command(host, ("sh", "-c", _tcp_settings(self._rates[host]))))
        limited = [(host, rate) for host, rate in self._rates.items() if rate is not None]
        for host, rate in limited:
            await _batch("tc", _limited("eth0", rate), "-n", self.namespace_of(host))
        cables = (_limited(f"c{self._numbers[host] + 1}", rate) for host, rate in limited)
        await _batch("tc", list(chain.from_iterable(cables)), "-n", bridge)

    async def close(self) -> None:
        """Remove the namespaces that exist, once their processes have ended. What cannot be removed is left to the next run."""
        if self._opened:
            try:
                await _remove(os.getpid())
            except NoNamespacesError as error:
                log.warning("network namespaces of this run could not be removed: %s", error)

    def _address(self, number: int) -> str:
        number += 1
        return _NETWORK.format(18 + self._part // 64, self._part % 64 * 4 + number // 256, number % 256)

    async def _remove_leftovers(self) -> None:
        alive = set(os.listdir("/proc")) - {str(os.getpid())}  # the process that had our number before has ended
        for owner in await _owners():
            if str(owner) not in alive:
                await _remove(owner)

    async def _free_part(self) -> int:
        taken = await _run("ip", "-o", "-4", "addr", "show")
        for tried in range(_PARTS):
            self._part = (os.getpid() + tried) % _PARTS
            if f" {self.address}/22" not in taken:
                return self._part
        raise NoNamespacesError("too many runs on this machine have namespaces already")


def in_namespace(name: str, command: Sequence[str]) -> tuple[str, ...]:
    """The command with a prefix that runs it in a namespace, by its name."""
    return ("ip", "netns", "exec", name, *command)


def open_namespace(name: str) -> int:
    """The file of a namespace's network, for `enter_network`. The caller closes it. Raises `OSError`."""
    return os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)


def enter_namespace(name: str) -> None:
    """Move this thread, and those that it starts, into a namespace's network. Raises `OSError`."""
    file = open_namespace(name)
    try:
        enter_network(file, name)
    finally:
        os.close(file)


def enter_network(file: int, name: str) -> None:
    """The same for a namespace whose file is open. If this thread is in it already, nothing happens, and no rights are needed."""
    if os.fstat(file).st_ino == os.stat("/proc/thread-self/ns/net").st_ino:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, _CLONE_NEWNET) < 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _tcp_settings(rate: float | None) -> str:
    """A shell command that sets how TCP behaves in a namespace."""
    lines = [f"echo {CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"]
    if rate is not None:
        window = max(LEAST_WINDOW_BYTES, int(rate * WINDOW_S))
        lines.append(f"echo 4096 {window} {window} > /proc/sys/net/ipv4/tcp_rmem")
        lines.append(f"ip link set dev eth0 gso_max_size {min(MOST_LUMP_BYTES, max(LEAST_LUMP_BYTES, int(rate * LUMP_S)))}")
    return "; ".join(lines)


def _limited(device: str, rate: float) -> list[str]:
    """Commands of ``tc`` that limit a device to ``rate`` payload bytes per second and send packets marked as urgent first."""
    gross = rate * FRAME_BYTES / PAYLOAD_BYTES
    burst = max(LEAST_BURST_BYTES, int(gross * BURST_S))
    limit = max(LEAST_QUEUE_BYTES, int(gross * QUEUE_S))
    whole = int(gross * 8)
    half = f"rate {whole // 2}bit ceil {whole}bit burst {burst} cburst {burst}"  # the guaranteed rate, and the most that it may use
    return [
        f"qdisc add dev {device} root handle 1: htb default 3",
        f"class add dev {device} parent 1: classid 1:1 htb rate {whole}bit burst {burst} cburst {burst}",
        f"class add dev {device} parent 1:1 classid 1:2 htb {half} prio 0 quantum {QUANTUM_BYTES}",
        f"class add dev {device} parent 1:1 classid 1:3 htb {half} prio 1 quantum {QUANTUM_BYTES}",
        f"qdisc add dev {device} parent 1:2 bfifo limit {limit}",
        f"qdisc add dev {device} parent 1:3 bfifo limit {limit}",
        f"filter add dev {device} parent 1: protocol ip u32 match ip tos {URGENT_TOS:#x} {URGENT_TOS:#x} classid 1:2",
    ]


async def _owners() -> list[int]:
    """The process numbers in the names of namespaces."""
    listed = await _run("ip", "netns", "list")
    matches = (_OWNED.match(line) for line in listed.splitlines())
    return sorted({int(match[1]) for match in matches if match})


async def _remove(owner: int) -> None:
    listed = await _run("ip", "netns", "list")
    names = [line.split()[0] for line in listed.splitlines() if line.startswith(f"zt{owner}-")]
    with suppress(NoNamespacesError):  # it is removed with the bridge's namespace, but that may take a moment
        await _run("ip", "link", "del", f"zt{owner}")
    await _batch("ip", [f"netns del {name}" for name in names], "-force")


async def _batch(tool: str, lines: Sequence[str], *options: str) -> None:
    """Run many commands of a tool in one process."""
    if lines:
        await _run(tool, *options, "-batch", "-", text="\n".join(lines) + "\n")


async def _run(*command: str, text: str = "") -> str:
    with tempfile.TemporaryFile() as file:  # the pipe may break before everything is written
        file.write(text.encode())
        file.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=file, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    try:
        async with asyncio.timeout(_PATIENCE_S):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise NoNamespacesError(f"{' '.join(command[:4])} took too long") from None
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
        raise NoNamespacesError(f"{' '.join(command[:4])}: {lines[0]}")
    return output.decode(errors="replace")
