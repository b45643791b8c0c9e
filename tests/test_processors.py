"""Processors that a process may use: trees of cgroups as data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zmqtrain.processors import cgroup_quota, gpus, processors
from zmqtrain.topology.hosts import Host

V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"
V1 = "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\ncgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
CPU = "sys/fs/cgroup/cpu,cpuacct"


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "proc/self/mounts": V2}, None),
        ({"proc/self/cgroup": "0::/\n", "proc/self/mounts": V2, "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "proc/self/mounts": V2, "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {  # the least of a group and those above it
                "proc/self/cgroup": "0::/user.slice/job\n",
                "proc/self/mounts": V2,
                "sys/fs/cgroup/user.slice/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/user.slice/job/cpu.max": "max 100000\n",
            },
            2.0,
        ),
        (
            {  # a path of the machine's, which is not there in the container
                "proc/self/cgroup": "0::/../../docker/abc\n",
                "proc/self/mounts": V2,
                "sys/fs/cgroup/cpu.max": "50000 100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpuset:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n",
                "proc/self/mounts": V1,
                f"{CPU}/docker/abc/cpu.cfs_quota_us": "300000\n",
                f"{CPU}/docker/abc/cpu.cfs_period_us": "100000\n",
                f"{CPU}/cpu.cfs_quota_us": "-1\n",
                f"{CPU}/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {  # in a container: the mount is the container's own
                "proc/self/cgroup": "2:cpu,cpuacct:/docker/abc\n",
                "proc/self/mounts": V1,
                f"{CPU}/cpu.cfs_quota_us": "100000\n",
                f"{CPU}/cpu.cfs_period_us": "50000\n",
            },
            2.0,
        ),
        ({"proc/self/cgroup": "0::/\n", "proc/self/mounts": V2, "sys/fs/cgroup/cpu.max": "many 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "proc/self/mounts": V2, "sys/fs/cgroup/cpu.max": "100000 0\n"}, None),
        ({"proc/self/cgroup": "nonsense\n", "proc/self/mounts": "short\n"}, None),
    ],
)  # fmt: skip
def test_the_quota_of_a_cgroup(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cgroup_quota(tree(tmp_path, files)) == quota


@pytest.mark.parametrize(("affinity", "most", "expected"), [(8, "max", 8), (8, "250000", 3), (2, "800000", 2), (8, "1000", 1)])
def test_the_least_of_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affinity: int, most: str, expected: int
) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mounts": V2, "sys/fs/cgroup/cpu.max": f"{most} 100000\n"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(affinity)))
    assert processors(tree(tmp_path, files)) == expected


def test_slots_are_processors_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert Host(name="here").slots == 1
    assert Host(name="here", slots=3).slots == 3
    assert Host(name="here", devices=("cuda:0", "cuda:1")).slots == 2  # each has a worker


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 2), ("0", 1), ("0,1", 2), ("", 0), ("-1", 0), ("1,5,0", 1), ("GPU-aaaa", 1), ("0,1,0", 2)],
)
def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int) -> None:
    root = tree(tmp_path, dict.fromkeys(("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "dev/nvidia-uvm", "dev/null"), ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus(root) == expected
    assert gpus(str(tmp_path / "nowhere")) == 0
