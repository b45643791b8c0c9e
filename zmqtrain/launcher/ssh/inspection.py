"""The preflight check of versions: do hosts have what the run needs, in matching versions? Pure: the engine asks, this module
judges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from zmqtrain.errors import HostFault
from zmqtrain.versions import versions

#: Packages that must be installed in the same version, besides Python. (Other packages are zmqtrain's own dependencies.)
PACKAGES = ("zmqtrain", "torch")

Fault: TypeAlias = HostFault


def own_versions() -> dict[str, str]:
    """The versions on this machine: ``python`` and the packages."""
    return {**dict.fromkeys(PACKAGES, "unknown"), **versions(PACKAGES)}


def faults_of_versions(host: str, ours: Mapping[str, str], theirs: Mapping[str, Any]) -> Iterator[Fault]:
    """The faults of a host's ``python`` and ``packages``, as reported by the remote program's check."""
    python = str(theirs["python"])
    if _release(python, 2) != _release(ours["python"], 2):
        yield Fault(
            host,
            f"Python {python}, but this machine has {ours['python']}",
            f"give the path of a Python {'.'.join(map(str, _release(ours['python'], 2)))} as python in [[hosts]]",
        )
    for name in PACKAGES:
        there = theirs["packages"].get(name)
        if there is None:
            yield Fault(host, f"no {name}", f"install it: {_pip(name, ours[name])}; or set another python in [[hosts]]")
        elif "unknown" not in (there, ours[name]) and public_version(there) != public_version(ours[name]):
            yield Fault(
                host, f"{name} {there}, but this machine has {ours[name]}", f"install the same version: {_pip(name, ours[name])}"
            )


def table(faults: Sequence[Fault], hosts: int) -> str:
    """All faults as a table, for a terminal."""
    faulty = len({fault.host for fault in faults})
    rows = [("host", "problem", "what to do"), *((fault.host, fault.what, fault.remedy) for fault in faults)]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"  {row[0]:{first}}  {row[1]:{second}}  {row[2]}".rstrip() for row in rows]
    return "\n".join([f"{faulty} of {hosts} hosts cannot take part:", *lines])


def _pip(name: str, wanted: str) -> str:
    return f"pip install {name}" if wanted == "unknown" else f"pip install {name}=={public_version(wanted)}"


def public_version(text: str) -> str:
    """A version without its local part: builds for CPUs and for GPUs (``2.4.0+cu121``) go together."""
    return text.partition("+")[0]


def _release(text: str, parts: int) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:parts] if part.isdigit())
