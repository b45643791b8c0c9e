"""The environment variables that tell a process how to find its run; it asks the coordinator for the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from zmqtrain.arena.arena import Arena
from zmqtrain.errors import UsageError
from zmqtrain.net.address import key_in
from zmqtrain.net.curve import Identity
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.shaping import SHAPING, Shaping
from zmqtrain.topology.timeouts import Timeouts

if TYPE_CHECKING:
    from zmqtrain.topology.job import Job
    from zmqtrain.topology.placement import Placement, RolePlacement

#: The coordinator's name as a peer.
COORDINATOR: PeerId = "coordinator"
PEER = "ZMQTRAIN_PEER"
COORDINATOR_ADDRESS = "ZMQTRAIN_COORDINATOR"
TOKEN = "ZMQTRAIN_TOKEN"
HOST = "ZMQTRAIN_HOST"
TIMEOUT = "ZMQTRAIN_TIMEOUT"
ARENA = "ZMQTRAIN_ARENA"
SLOT = "ZMQTRAIN_SLOT"
BIND = "ZMQTRAIN_BIND"
PORTS = "ZMQTRAIN_PORTS"
MEMBERS = "ZMQTRAIN_MEMBERS"
#: In a run with more members than these there are fewer messages for each.
FEW = 50
#: There, how long a request or an answer may be without an acknowledgement until it is asked for: longer than it usually takes
#: until another message goes the same way.
PROBE_LATER_S = 15.0
#: I/O threads of an endpoint that encrypts. One is enough for 1 Gbit/s in one direction, but not for both at once.
ENCRYPTED_IO_THREADS = 2


@dataclass(frozen=True, slots=True)
class RoleEnvironment:
    """Everything a process needs to join a run; the topology and the placement it asks the coordinator for."""

    peer: PeerId
    coordinator: str
    """Address of the coordinator's endpoint. If it contains the coordinator's public key, everything that this process sends is
    encrypted."""
    token: str = field(repr=False)
    """The run token. A secret: it goes by environment or standard input, never on a command line."""
    host: str = "127.0.0.1"
    """The address to advertise, and to bind if ``bind`` is empty."""
    timeout_s: float = 60.0
    """The value of ``[job] timeout``."""
    shaping: str = ""
    """The file with the shaping of an emulated network; empty: no shaping."""
    arena: str = ""
    """The path of the host's shared memory; empty if there is none."""
    slot: int = 0
    """The process's slot in it."""
    bind: str = ""
    """The address to bind, if others connect to a different one."""
    ports: tuple[int, int] | None = None
    """The first and the last port to listen on; ``None``: any port."""
    members: int = 0
    """How many processes the coordinator is in touch with; 0: few."""

    @classmethod
    def of_job(cls, job: Job, peer: PeerId, coordinator: str, token: str, *, members: int) -> RoleEnvironment:
        """That of a process of the job, on this machine."""
        return cls(peer, coordinator, token, timeout_s=job.timeout_s, ports=job.port_range, members=members)

    @property
    def timeouts(self) -> Timeouts:
        """The timeouts that follow from ``timeout_s``."""
        return Timeouts.of(self.timeout_s)

    def settings(self, arena: Arena | None = None) -> NetSettings:
        """The settings of the process's endpoint. ``arena``: its slot in the memory of its host."""
        shaping = Shaping.load(self.shaping, self.peer) if self.shaping else None
        settings = net_settings(
            self.timeouts,
            self.token,
            host=self.bind or self.host,
            ports=self.ports,
            identity=self._identity(),
            members=self.members,
        )
        return replace(settings, advertise=self.host if self.bind else "", shaping=shaping, arena=arena)

    def _identity(self) -> Identity | None:
        """New keys, if the run is encrypted."""
        try:
            key = key_in(self.coordinator)
        except ValueError as error:
            raise UsageError(f"{COORDINATOR_ADDRESS}: {error}") from error
        return None if key is None else Identity.member(self.token, key)

    def to_environ(self) -> dict[str, str]:
        """Return this as environment variables."""
        return {
            PEER: self.peer,
            COORDINATOR_ADDRESS: self.coordinator,
            TOKEN: self.token,
            HOST: self.host,
            TIMEOUT: repr(self.timeout_s),
            SHAPING: self.shaping,
            ARENA: self.arena,
            SLOT: str(self.slot),
            BIND: self.bind,
            PORTS: "" if self.ports is None else f"{self.ports[0]}-{self.ports[1]}",
            MEMBERS: str(self.members),
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> RoleEnvironment | None:
        """Read what `to_environ` wrote; ``None`` if this process was not started for a run.

        Raises `UsageError` if only some of the variables are set, or if a value is wrong.
        """
        variables = os.environ if environ is None else environ
        needed = (PEER, COORDINATOR_ADDRESS, TOKEN)
        missing = [name for name in needed if not variables.get(name)]
        if len(missing) == len(needed):
            return None
        if missing:
            raise UsageError(
                f"{', '.join(missing)} must be set to join a run (zmqtrain launch sets them for the processes it starts)"
            )
        text = variables.get(TIMEOUT, "60.0")
        try:
            timeout_s = float(text)
        except ValueError as error:
            raise UsageError(f"{TIMEOUT} is {text!r}; it must be a number of seconds") from error
        host = variables.get(HOST, "127.0.0.1")
        arena, slot, members = variables.get(ARENA, ""), variables.get(SLOT, "0"), variables.get(MEMBERS, "0")
        for name, number in ((SLOT, slot), (MEMBERS, members)):
            if not number.isdecimal():
                raise UsageError(f"{name} is {number!r}; it must be a number")
        return cls(
            variables[PEER],
            variables[COORDINATOR_ADDRESS],
            variables[TOKEN],
            host,
            timeout_s,
            variables.get(SHAPING, ""),
            arena,
            int(slot),
            variables.get(BIND, ""),
            ports_in(variables.get(PORTS, "")),
            int(members),
        )


def ports_in(text: str) -> tuple[int, int] | None:
    """The range of ports in ``ZMQTRAIN_PORTS``; ``None`` if it is empty. Raises `UsageError`."""
    if not text:
        return None
    first, mark, last = text.partition("-")
    if not (mark and first.isdecimal() and last.isdecimal() and 0 < int(first) < int(last) < 65536):
        raise UsageError(f'{PORTS} is {text!r}; it must be a range of ports, like "29400-29500"')
    return int(first), int(last)


def net_settings(
    timeouts: Timeouts,
    token: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ports: tuple[int, int] | None = None,
    identity: Identity | None = None,
    members: int = 0,
) -> NetSettings:
    """An endpoint's settings, with its time-outs from ``timeouts``. ``identity``: its keys, if connections are encrypted.
    ``members``: how many processes the coordinator is in touch with."""
    return NetSettings(
        token=token,
        host=host,
        port=port,
        ports=ports,
        greet_s=timeouts.join_s,
        lost_s=timeouts.lost_s,
        heartbeat_s=timeouts.ping_s,
        heartbeats_s={COORDINATOR: timeouts.ping_for(members)},
        probe_later_s=PROBE_LATER_S if members > FEW else None,
        flush_s=timeouts.flush_s,
        identity=identity,
        io_threads=1 if identity is None else ENCRYPTED_IO_THREADS,
    )


def rank_variables(role: RolePlacement, placement: Placement, master: str, port: int) -> dict[str, str]:
    """The variables that torchrun sets, for code that reads them. Model servers have none."""
    if role.kind != "worker":
        return {}
    here = [other for other in placement.of_host(role.host) if other.kind == "worker"]
    hosts = [name for name in placement.hosts if any(other.kind == "worker" for other in placement.of_host(name))]
    hosts += [spare.host for spare in placement.spare_workers]
    return {
        "RANK": str(role.index),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(role.local_rank),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "GROUP_RANK": str(hosts.index(role.host)),
        "GROUP_WORLD_SIZE": str(len(hosts)),
        "ROLE_NAME": "worker",
        "ROLE_RANK": str(role.index),
        "ROLE_WORLD_SIZE": str(placement.world_size),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
    }
