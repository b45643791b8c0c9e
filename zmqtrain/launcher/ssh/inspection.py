"""The first look at the hosts: do they have what the run needs, in versions that agree? Pure; the engine asks, this judges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from zmqtrain.errors import HostFault
from zmqtrain.versions import versions

#: What must be there, in the same version, beside Python. (Other packages are zmqtrain's own dependencies.)
PACKAGES = ("zmqtrain", "torch")

Fault: TypeAlias = HostFault


def own_versions() -> dict[str, str]:
    """What this machine has: ``python`` and the packages."""
    return {**dict.fromkeys(PACKAGES, "unknown"), **versions(PACKAGES)}


def faults_of_versions(host: str, ours: Mapping[str, str], theirs: Mapping[str, Any]) -> Iterator[Fault]:
    """What is wrong with a host's ``python`` and ``packages``, as the remote program's check tells them."""
    python = str(theirs["python"])
    if _release(python, 2) != _release(ours["python"], 2):
        yield Fault(
            host,
            f"Python {python}, and {ours['python']} here",
            f"give the path of a Python {'.'.join(map(str, _release(ours['python'], 2)))} as python in [[hosts]]",
        )
    for name in PACKAGES:
        there = theirs["packages"].get(name)
        if there is None:
            yield Fault(host, f"no {name}", f"install it: {_pip(name, ours[name])}; or name another python in [[hosts]]")
        elif "unknown" not in (there, ours[name]) and public_version(there) != public_version(ours[name]):
            yield Fault(host, f"{name} {there}, and {ours[name]} here", f"install the same: {_pip(name, ours[name])}")


def table(faults: Sequence[Fault], hosts: int) -> str:
    """All faults as a text, for a terminal."""
    faulty = len({fault.host for fault in faults})
    rows = [("host", "what is wrong", "what to do"), *((fault.host, fault.what, fault.remedy) for fault in faults)]
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
