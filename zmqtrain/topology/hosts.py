"""``[[hosts]]``: the machines, and how many workers may compute on each at the same time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from zmqtrain.processors import processors
from zmqtrain.topology import ranges
from zmqtrain.topology.login import SshLogin
from zmqtrain.topology.loopback import LOCAL_ADDRESSES
from zmqtrain.topology.section import Section, Texts, _tuple

LONGEST_NAME = 64
_DEVICE = re.compile(r"cpu|cuda:\d{1,3}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _devices(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not _DEVICE.fullmatch(value):
            raise ValueError(f'contains {value!r}, which is not a device: write "cuda:0", "cuda:1", ... or "cpu"')
    return values


def _name(value: str) -> str:
    last = ranges.last(value)
    if len(last) > LONGEST_NAME:
        raise ValueError(f"is too long: a name has at most {LONGEST_NAME} characters")
    return value


def _address(value: str) -> str:
    ranges.count(value)
    return value


def _bind(value: str) -> str:
    ranges.count(value)
    if "[" not in value:
        try:
            ip_address(value)
        except ValueError:
            raise ValueError('is not an IP address: write an address of the host, or "0.0.0.0" or "::" for all') from None
    return value


def _path(value: str) -> str:
    if not value or value.startswith("-") or not value.isprintable():
        raise ValueError("is not a path")
    return value


def _variables(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ValueError(f"contains {name!r}, which cannot be the name of an environment variable")
        if name.startswith("ZMQTRAIN_"):
            raise ValueError(f"contains {name}, which zmqtrain sets itself: remove it")
    return values


class Host(Section):
    """One machine."""

    name: Annotated[str, AfterValidator(_name)] = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._\[\]-]{0,127}$",
        description="A name of your choice, unique in the file, which labels logs. A range such as `node[01-16]` stands for that "
        "many hosts.",
    )
    address: Annotated[str, AfterValidator(_address)] = Field(
        default="127.0.0.1",
        pattern=r"^\S{1,255}$",
        description="IP address or name under which the other hosts reach this one. A range of hosts takes a range of the same "
        "length, such as `10.0.0.[1-16]`, or one address for all if they are sets of processes on one machine.",
    )
    slots: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="How many workers may compute here at the same time; each gets an equal share of the slots as threads. "
        "Default, or 0: the processors that may be used there, by CPU affinity and the cgroup's quota (on this "
        "machine, on hosts reached by ssh, and on hosts that join by themselves), and at least one for each device. "
        "Model servers mostly wait for the network and take no slot.",
    )
    devices: Annotated[Texts, AfterValidator(_devices)] = Field(
        default=(),
        description="Accelerators that workers on this host use in turn, such as `cuda:0`; if the file does not mention groups, "
        "each device gets a worker. Empty: see `[compute] device`.",
    )
    bind: Annotated[str, AfterValidator(_bind)] | None = Field(
        default=None,
        description="Address on which this host's processes listen. Default: `address`, or all addresses of the host if "
        '`address` is a name. Use `"0.0.0.0"` or `"::"` if `address` is translated on the way (NAT).',
    )
    python: Annotated[str, AfterValidator(_path)] | None = Field(
        default=None,
        description="The Python interpreter on this host that has zmqtrain and torch. Default: the path of the interpreter that "
        "launches.",
    )
    folder: Annotated[str, AfterValidator(_path)] | None = Field(
        default=None,
        description="The folder on this host to which relative paths refer; it must exist there. Default: the path of the folder "
        "in which you launch or, with `[engine] sync`, the copy of that folder.",
    )
    environment: Annotated[dict[str, str], AfterValidator(_variables)] = Field(
        default_factory=dict,
        description="Environment variables for all processes on this host. If it is a set of processes on this machine, for its "
        "workers and servers, which begin after torch is imported: what torch or the loader of programs reads (such as "
        "OMP_PROC_BIND or LD_PRELOAD) must be set for `zmqtrain launch` itself.",
    )
    ssh: SshLogin = Field(default_factory=SshLogin, description='How to log in to the host, for `[engine] kind = "ssh"`.')

    @model_validator(mode="after")
    def _slots_of_this_machine(self) -> Host:
        if self.slots == 0 and self.local:
            object.__setattr__(self, "slots", max(processors(), len(self.devices)))
        return self

    @property
    def local(self) -> bool:
        """Whether the address belongs to this machine."""
        return self.address in LOCAL_ADDRESSES

    @property
    def count(self) -> int:
        """The number of hosts that this entry stands for."""
        return ranges.count(self.name)

    @property
    def addresses(self) -> int:
        """The number of addresses: one for each host, or one for all."""
        return ranges.count(self.address)

    @property
    def listens_at(self) -> str:
        """The address that the host's processes bind."""
        if self.bind is not None:
            return self.bind
        try:
            ip_address(self.address)
        except ValueError:  # a name: it may resolve to another address here than elsewhere, or to addresses of both families
            return "::"
        return self.address

    def expanded(self) -> tuple[Host, ...]:
        """The single hosts that a range stands for."""
        if self.count == 1 and "[" not in self.name + self.address + (self.bind or "") + (self.ssh.host or ""):
            return (self,)
        names = ranges.expand(self.name)

        def each(text: str) -> tuple[str, ...]:
            texts = ranges.expand(text)
            return texts if len(texts) == len(names) else texts[:1] * len(names)

        addresses = each(self.address)
        binds = (None,) * len(names) if self.bind is None else each(self.bind)
        logins = [self.ssh] * len(names)
        if self.ssh.host is not None:
            logins = [self.ssh.model_copy(update={"host": host}) for host in each(self.ssh.host)]
        return tuple(
            self.model_copy(update={"name": name, "address": address, "bind": bind, "ssh": login})
            for name, address, bind, login in zip(names, addresses, binds, logins, strict=True)
        )


Hosts = Annotated[tuple[Host, ...], BeforeValidator(_tuple)]


def gathered(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """The same hosts, with neighbours that differ only by a number written as a range: the inverse of `Host.expanded`."""
    entries: list[Host] = []
    start = 0
    for end in range(1, len(hosts) + 1):
        if end == len(hosts) or not _continues(hosts[start : start + 2], hosts[end], end - start):
            entries.append(_entry(hosts[start], hosts[end - 1]))
            start = end
    return tuple(entries)


def _continues(firsts: Sequence[Host], host: Host, places: int) -> bool:
    """Whether ``host`` is ``places`` places after the first host of a range; the first two show how its addresses are numbered."""
    first = firsts[0]
    one_address = (host if places == 1 else firsts[1]).address == first.address
    address = first.address if one_address else ranges.ahead(first.address, places)
    if (host.name, host.address) != (ranges.ahead(first.name, places), address):
        return False
    return host.model_copy(update={"name": first.name, "address": first.address}) == first


def _entry(first: Host, last: Host) -> Host:
    if first.name == last.name:
        return first
    address = first.address if first.address == last.address else ranges.between(first.address, last.address)
    return first.model_copy(update={"name": ranges.between(first.name, last.name), "address": address})
