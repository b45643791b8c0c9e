"""How many processors, and GPUs, this process may use. Needs Python alone (3.7 or later), as programs that are sent to hosts do.

A machine may have more: a container, a scheduler or ``taskset`` gives a process some of them (its affinity), or a part of their
time (its cgroup's quota). More threads than that wait for each other.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator

#: An NVIDIA GPU's device file.
_GPU = re.compile(r"nvidia\d+")


def processors(root: str = "/") -> int:
    """Processors that this process may use, at least 1: those of its affinity, or as much of their time as the quotas of its cgroup
    (version 1 or 2) and of all above it allow, rounded up. ``root``: where ``/proc`` and ``/sys`` are, for tests."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(root)
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def gpus(root: str = "/") -> int:
    """CUDA devices that this process may use, as far as one can tell without CUDA: those of the machine, or of
    ``CUDA_VISIBLE_DEVICES``."""
    try:
        there = sum(_GPU.fullmatch(name) is not None for name in os.listdir(os.path.join(root, "dev")))
    except OSError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or there == 0:
        return there
    found = 0
    for name in visible.split(","):  # as CUDA reads it: what stands behind the first that is none does not count
        name = name.strip()
        if not name or name.startswith("-") or (name.isdigit() and int(name) >= there):
            break
        found += 1
    return min(found, there)


def cgroup_quota(root: str = "/") -> float | None:
    """The least processor time, in processors, that this process's cgroups and those above them allow; ``None``: no limit."""
    quotas = []
    for version, controllers, path in _groups(root):
        mount = _mount(root, version, controllers)
        if mount is None:
            continue
        for folder in _upwards(mount, path):
            quota = _quota_2(folder) if version == 2 else _quota_1(folder)
            if quota is not None:
                quotas.append(quota)
    return min(quotas) if quotas else None


def _groups(root: str) -> Iterator[tuple[int, list[str], str]]:
    """The cgroups of this process that may limit its processors: version, controllers and path."""
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            yield 2, [], path
        elif "cpu" in names.split(","):
            yield 1, names.split(","), path


def _mount(root: str, version: int, controllers: list[str]) -> str | None:
    """Where a hierarchy of cgroups is mounted."""
    for line in _read(os.path.join(root, "proc/self/mounts")).splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        folder, kind, options = fields[1], fields[2], fields[3].split(",")
        if (version == 2 and kind == "cgroup2") or (version == 1 and kind == "cgroup" and "cpu" in options):
            return os.path.join(root, folder.lstrip("/"))
    return None


def _upwards(mount: str, path: str) -> Iterator[str]:
    """The folders of a cgroup and of all above it. In a container the path may be the machine's, and the mount the container's own:
    folders that are not there are left out, the mount itself never."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for count in range(len(parts), -1, -1):
        yield os.path.join(mount, *parts[:count])


def _quota_2(folder: str) -> float | None:
    words = _read(os.path.join(folder, "cpu.max")).split()
    if len(words) != 2 or words[0] == "max":
        return None
    return _ratio(words[0], words[1])


def _quota_1(folder: str) -> float | None:
    quota = _read(os.path.join(folder, "cpu.cfs_quota_us")).strip()
    return _ratio(quota, _read(os.path.join(folder, "cpu.cfs_period_us")).strip())


def _ratio(quota: str, period: str) -> float | None:
    """``None`` for no limit (-1), and for what is no number."""
    if not quota.isdigit() or not period.isdigit() or int(quota) == 0 or int(period) == 0:
        return None
    return int(quota) / int(period)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
