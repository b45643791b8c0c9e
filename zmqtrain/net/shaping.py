"""What a process needs to know to send as slowly as a given network: plain values, from a file that a run's processes read."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.net.conditions import Conditions
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.nics import TIMES, Nics

#: The environment variable with the file's name, in every process of an emulated run.
SHAPING = "ZMQTRAIN_SHAPING"
#: The file's name.
PLAN = "shaping.json"


@dataclass(frozen=True, slots=True)
class LinkShape:
    """The link from one host to another."""

    nics: tuple[int, ...] = ()
    """The NICs on its path, by number, the sender's first. None: as fast as possible."""
    latency_s: float = 0.0
    down: bool = False
    """Whether the link carries nothing."""


@dataclass(frozen=True, slots=True)
class Shaping:
    """The network as one host sees it."""

    host: str
    host_of: Mapping[PeerId, str]
    """The host of each process. A process that is not listed is on this host."""
    ways: Mapping[str, LinkShape]
    """Link shapes by the host that the link leads to. Links that are not listed are not shaped."""
    rates: Sequence[float] = ()
    """Bytes per second of each NIC. What counts is what the endpoint sends: its headers and the payload."""
    nics_file: str = ""
    """The file with the times of NICs that the processes of all hosts share; empty if no link has a NIC."""
    peer: PeerId = ""
    """The process that sends."""
    conditions: Conditions | None = None
    """What changes while the run goes on; ``None``: nothing does."""

    def way_to(self, peer: PeerId) -> LinkShape | None:
        """The link to a process; ``None`` if it is not shaped."""
        host = self.host_of.get(peer, self.host)
        return None if host == self.host else self.ways.get(host)

    @classmethod
    def load(cls, path: str, peer: PeerId) -> Shaping:
        """What ``peer`` needs to know from a plan that `ShapingPlan.write` wrote. Raises `UsageError` if there is none."""
        try:
            document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{SHAPING} is {path!r}, which cannot be read: {error}") from error
        host = document["host_of"].get(peer, "")
        ways = {target: LinkShape(tuple(nics), *rest) for target, nics, *rest in document["ways"].get(host, ())}
        host_of, changing = document["host_of"], document["conditions_file"]
        conditions = Conditions(Path(changing), host_of) if changing and peer in host_of else None
        return cls(host, host_of, ways, document["rates"], document["nics_file"], peer, conditions)


@dataclass(frozen=True, slots=True)
class ShapingPlan:
    """The network as all hosts see it."""

    host_of: Mapping[PeerId, str]
    ways: Mapping[tuple[str, str], LinkShape]
    rates: Sequence[float] = field(default_factory=list)

    def write(self, folder: Path, conditions: Path | None = None) -> Path:
        """Write it to a folder, with the NICs that all share. ``conditions``: the file that `Conditions.create` has made.

        Returns the file for `Shaping.load`."""
        nics_file = ""
        if self.rates:
            nics = folder / "NICs"
            nics.write_bytes(bytes(8 * TIMES * len(self.rates)))
            nics_file = str(nics)
        ways: dict[str, list[tuple[str, Sequence[int], float, bool]]] = {}
        for (source, target), way in self.ways.items():
            ways.setdefault(source, []).append((target, way.nics, way.latency_s, way.down))
        document: dict[str, Any] = {"host_of": dict(self.host_of), "ways": ways, "rates": list(self.rates), "nics_file": nics_file}
        document["conditions_file"] = "" if conditions is None else str(conditions)
        path = folder / PLAN
        path.write_text(json.dumps(document), encoding="utf-8")
        return path


class SharedNics:
    """The NICs of a run, used by one process at a time: ``with shared as NICs: NICs.reserve(...)``. Never wait inside."""

    def __init__(self, path: str, rates: Sequence[float]) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory = mmap.mmap(self._file, 8 * TIMES * len(rates))
        self._times = memoryview(self._memory).cast("d")
        self._nics = Nics(self._times, rates)

    def __enter__(self) -> Nics:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        return self._nics

    def __exit__(self, *_exc: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._times.release()
        self._memory.close()
        os.close(self._file)
