"""``[[hosts]]``: the machines, and how much may compute on each at once."""

from __future__ import annotations

import os
import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from zmqtrain.topology.ranges import expand
from zmqtrain.topology.section import Section, Texts, _tuple

LOCAL_ADDRESSES = ("127.0.0.1", "localhost", "::1")
_DEVICE = re.compile(r"cpu|cuda:\d{1,3}")


def _devices(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not _DEVICE.fullmatch(value):
            raise ValueError(f'holds {value!r}, which is no device: write "cuda:0", "cuda:1", ... or "cpu"')
    return values


class Host(Section):
    """One machine."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}(\[[0-9-]{1,19}\][A-Za-z0-9._-]{0,63})?$",
        description="A name of your choice, unique in the file; it labels logs. A range, like `node[01-16]`, is as many hosts.",
    )
    address: str = Field(
        default="127.0.0.1",
        pattern=r"^\S{1,255}$",
        description="IP address or name under which the other hosts reach this one; for a "
        "range of hosts one as long, like `10.0.0.[1-16]`.",
    )
    slots: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="Workers that may compute here at once; each gets an even share of the slots as threads. Left out or 0 on "
        "this machine: the number of its processors. Model servers wait for the network most of the time and take no slot.",
    )
    devices: Annotated[Texts, AfterValidator(_devices)] = Field(
        default=(),
        description="Accelerators that workers here take in turn, like `cuda:0`. Empty: as `[compute] device` says.",
    )

    @model_validator(mode="after")
    def _ranges_match(self) -> Host:
        names, addresses = expand(self.name), expand(self.address)
        if len(addresses) not in (1, len(names)):
            raise ValueError(f"{len(names)} names and {len(addresses)} addresses: give as many of both, or one address for all")
        return self

    def expanded(self) -> tuple[Host, ...]:
        """The hosts that a range stands for."""
        names, addresses = expand(self.name), expand(self.address)
        if len(names) == 1:
            return (self,)
        each = addresses if len(addresses) > 1 else addresses * len(names)
        return tuple(self.model_copy(update={"name": n, "address": a}) for n, a in zip(names, each, strict=True))

    @model_validator(mode="after")
    def _slots_of_this_machine(self) -> Host:
        if self.slots == 0 and self.local:
            object.__setattr__(self, "slots", os.cpu_count() or 1)
        return self

    @property
    def local(self) -> bool:
        """Whether the address is this machine's own."""
        return self.address in LOCAL_ADDRESSES


Hosts = Annotated[
    tuple[Host, ...],
    BeforeValidator(_tuple),
]
