"""What each system's variables say: a table."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.launcher.environment.place import read_place, split_endpoint

KUBEFLOW = "PET_NNODES=4 PET_NPROC_PER_NODE=auto PET_NODE_RANK=2 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29401"
ELASTIC = "PET_RDZV_ENDPOINT=job-worker-0:23456 PET_RDZV_BACKEND=c10d PET_NNODES=2:4 HOSTNAME=job-worker-1"
SKYPILOT = "SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2 SKYPILOT_NUM_GPUS_PER_NODE=8"
JOBSET = "JOBSET_NAME=train REPLICATED_JOB_NAME=workers JOB_INDEX=0 JOB_COMPLETION_INDEX=3 POD_IP=10.4.0.9"
SLURM = "SLURM_NODEID=1 SLURM_LOCALID=0 SLURM_JOB_NODELIST=n[07-09],m1 SLURM_NNODES=4 SLURMD_NODENAME=n08"
OPERATOR = "MASTER_ADDR=job-master-0 MASTER_PORT=23456 RANK=1 WORLD_SIZE=3 HOSTNAME=job-worker-0"


def variables(text: str, **more: str) -> dict[str, str]:
    return {**dict(pair.split("=", 1) for pair in text.split()), **more}


def place_of(environ: dict[str, str], *, together: bool = False) -> dict[str, object]:
    return {name: value for name, value in asdict(read_place(environ, together=together)).items() if value not in (None, "", ())}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, {}),
        (
            variables(KUBEFLOW),
            {"system": "Kubeflow", "launcher": "job-node-0-0.job", "port": 29401, "rank": 2, "nodes": 4},
        ),
        (
            variables(ELASTIC),
            {"system": "Kubeflow", "launcher": "job-worker-0", "port": 23456, "names": ("job-worker-1",)},
        ),
        (
            variables("PET_RDZV_ENDPOINT=etcd:2379 PET_RDZV_BACKEND=etcd-v2 PET_NNODES=2:2 MASTER_ADDR=first"),
            {"system": "Kubeflow", "launcher": "first", "nodes": 2},
        ),
        (
            variables(SKYPILOT, SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2\n"),
            {"system": "SkyPilot", "launcher": "10.0.0.1", "rank": 1, "nodes": 2, "address": "10.0.0.2"},
        ),
        (
            variables(JOBSET),
            {
                "system": "JobSet",
                "launcher": "train-launcher-0-0.train",
                "names": ("workers-0-3", "workers-3"),
                "address": "10.4.0.9",
            },
        ),
        (
            variables(JOBSET, JOBSET_SUBDOMAIN="net", JOB_INDEX="2"),
            {
                "system": "JobSet",
                "launcher": "train-launcher-0-0.net",
                "names": ("workers-2-3",),
                "address": "10.4.0.9",
            },
        ),
        (
            variables(SLURM),
            {"system": "Slurm", "launcher": "n07", "names": ("n08",), "rank": 1, "nodes": 4},
        ),
        (
            variables(SLURM, SLURM_STEP_NODELIST="n[08-09]", MASTER_ADDR="n09-fast", MASTER_PORT="5000"),
            {"system": "Slurm", "launcher": "n09-fast", "port": 5000, "names": ("n08",), "rank": 1, "nodes": 2},
        ),
        (
            variables(OPERATOR),
            {
                "system": "torch.distributed",
                "launcher": "job-master-0",
                "port": 23456,
                "names": ("job-worker-0",),
                "rank": 1,
                "nodes": 3,
            },
        ),
        (
            variables("MASTER_ADDR=a NODE_RANK=0 NNODES=2 RANK=7 WORLD_SIZE=8"),
            {"system": "torch.distributed", "launcher": "a", "rank": 0, "nodes": 2},
        ),
        (
            variables(
                f"{SLURM} ZMQTRAIN_COORDINATOR=[fd00::1]:7 ZMQTRAIN_NAME=beta ZMQTRAIN_NODE_RANK=0 ZMQTRAIN_NODES=2 "
                "ZMQTRAIN_HOST=fd00::2 ZMQTRAIN_BIND=:: POD_IP=10.0.0.1"
            ),
            {
                "system": "Slurm",
                "launcher": "fd00::1",
                "port": 7,
                "names": ("beta",),
                "rank": 0,
                "nodes": 2,
                "address": "fd00::2",
                "bind": "::",
            },
        ),
    ],
)
def test_places(environ: dict[str, str], place: dict[str, object]) -> None:
    assert place_of(environ) == place


def test_the_first_pod_launches_where_all_run_the_same_command() -> None:
    place = read_place(variables(JOBSET, JOB_COMPLETION_INDEX="0"), together=True)
    assert (place.launcher, place.rank) == ("train-workers-0-0.train", 0)
    assert (
        read_place(variables(JOBSET, JOBSET_COORDINATOR="train-head-0-0.train"), together=True).launcher == "train-head-0-0.train"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SLURM_NODEID=x", "SLURM_NODEID is 'x'"),
        ("SLURM_NODEID=0 SLURM_LOCALID=1", "--ntasks-per-node=1"),
        ("SLURM_NODEID=0 SLURM_JOB_NODELIST=n[1", "SLURM_JOB_NODELIST has unmatched brackets"),
        ("PET_NNODES=many", "PET_NNODES is 'many'"),
        ("MASTER_ADDR=a MASTER_PORT=0", "MASTER_PORT is '0'"),
        ("SKYPILOT_NODE_RANK=1 SKYPILOT_NODE_IPS=10.0.0.1", "has 1 addresses"),
        ("ZMQTRAIN_COORDINATOR=tcp://a:1", "HOST:PORT"),
        ("ZMQTRAIN_NODE_RANK=2 ZMQTRAIN_NODES=2", "node 2 of 2 nodes"),
        ("ZMQTRAIN_NODES=0", "1 or more"),
    ],
)
def test_wrong_values_are_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_place(variables(text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("", None, None),
        ("a", "a", None),
        ("a:1", "a", 1),
        ("[::1]:2", "::1", 2),
        ("[::1]", "::1", None),
        ("fd00::1", "fd00::1", None),
    ],
)
def test_endpoints(text: str, host: str | None, port: int | None) -> None:
    assert split_endpoint(text, "VARIABLE") == (host, port)
