"""A topology as a Kubernetes JobSet: the launcher's pod, and a pod for each host. Pure.

`zmqtrain.launcher.environment.place` reads the pods' environment: the pods find each other by the names that the JobSet's
headless service gives them. Exit codes decide what happens to a pod that has failed: the permanent ones fail the
JobSet, the others start it again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.launcher.environment.place import DEFAULT_PORT, LAUNCHER_JOB
from zmqtrain.launcher.kubernetes.pods import Pods, pods_of
from zmqtrain.launcher.signals import ON_TERM
from zmqtrain.membership.environment import TOKEN
from zmqtrain.topology.hosts import gathered
from zmqtrain.topology.schema import Host, Topology
from zmqtrain.topology.toml_writer import write_toml

#: The folder in which pods find the topology file.
TOPOLOGY_FOLDER = "/etc/zmqtrain"
TOPOLOGY_FILE = "topology.toml"
#: Exit codes of permanent failures: wrong usage, an error in the user's code, and others that would happen again.
PERMANENT = (2, 3, *range(64, 128))
#: How many pods of an elastic run may be replaced, for each of its hosts, before the whole run counts as failed.
REPLACEMENTS = 10
#: Memory of the launcher's pod, which copies checkpoints and events.
LAUNCHER_CPU = "500m"
_LABELS = "metadata.labels['{}']"
_OF_JOBSET = "jobset.sigs.k8s.io/{}"


def manifests(topology: Topology, *, token: str) -> list[dict[str, Any]]:
    """The Secret, the ConfigMap and the JobSet of a run. ``token`` is the run's secret.

    Raises `UsageError` if the file lacks a setting that is needed.
    """
    engine = topology.engine.kubernetes
    if engine.image is None:
        raise UsageError('[engine.kubernetes] image is missing: set image = "..." to a container image with zmqtrain and the task')
    name = _name_of(topology.job.name)
    pods = pods_of(topology)
    space = {} if engine.namespace is None else {"namespace": engine.namespace}
    metadata: dict[str, Any] = {"name": name, **space, "labels": {"app.kubernetes.io/name": "zmqtrain"}}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**metadata, "name": f"{name}-token"},
        "type": "Opaque",
        "stringData": {"token": token},
    }
    topology_file = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "name": f"{name}-topology"},
        "data": {TOPOLOGY_FILE: _file(topology, pods)},
    }
    jobs = [_launcher(topology, name), *(_hosts(topology, name, each) for each in pods)]
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [LAUNCHER_JOB]},
            "failurePolicy": {
                "maxRestarts": engine.restarts,
                "restartStrategy": "BlockingRecreate",
                "rules": [{"name": "permanent", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": jobs,
        },
    }
    return [secret, topology_file, jobset]


def _name_of(job: str) -> str:
    """The job's name in a form that Kubernetes allows; names of pods, which begin with it, have at most 63 characters."""
    name = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")[:20].strip("-")
    return name if name[:1].isalpha() else f"z{name}"


def _file(topology: Topology, pods: tuple[Pods, ...]) -> str:
    """The topology file for the pods: the user's settings, the hosts, and where they meet."""
    values = topology.model_dump(mode="json", exclude_unset=True, exclude_none=True, by_alias=True)
    values["job"] = {**values["job"], "name": topology.job.name, "port": _port(topology)}
    values["engine"] = {"kind": "kubernetes", "wait": topology.engine.model_dump(mode="json")["wait"]}
    values["hosts"] = [_entry(each) for each in pods]
    return write_toml(values)


def _entry(pods: Pods) -> dict[str, Any]:
    """The ``[[hosts]]`` entry for the pods of one kind; they report their addresses when they join."""
    (entry,) = gathered(pods.hosts)
    values = entry.model_dump(mode="json")
    return {key: values[key] for key in ("name", "slots", "devices", "environment", "bind", "folder") if values[key]}


def _port(topology: Topology) -> int:
    return topology.job.port or DEFAULT_PORT


def _launcher(topology: Topology, name: str) -> dict[str, Any]:
    engine = topology.engine.kubernetes
    command = ["zmqtrain", "launch", f"{TOPOLOGY_FOLDER}/{TOPOLOGY_FILE}", "--run-dir", f"runs/{name}", "--continue"]
    volumes: list[dict[str, Any]] = [
        {"name": "topology", "configMap": {"name": f"{name}-topology"}},
        {"name": "runs", **({"emptyDir": {}} if engine.claim is None else {"persistentVolumeClaim": {"claimName": engine.claim}})},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "topology", "mountPath": TOPOLOGY_FOLDER, "readOnly": True},
        {"name": "runs", "mountPath": f"{engine.folder.rstrip('/')}/runs"},
    ]
    container = {
        **_container(topology, name, command, mounts),
        "ports": [{"name": "rendezvous", "containerPort": _port(topology)}],
        "resources": {"requests": {"cpu": LAUNCHER_CPU}},
    }
    return _job(topology, LAUNCHER_JOB, 1, container, volumes, backoff=0)


def _hosts(topology: Topology, name: str, pods: Pods) -> dict[str, Any]:
    first = pods.hosts[0]
    resources: dict[str, Any] = {"requests": {"cpu": first.slots or 1}}
    if topology.engine.kubernetes.memory is not None:
        resources["requests"]["memory"] = topology.engine.kubernetes.memory
        resources["limits"] = {"memory": topology.engine.kubernetes.memory}
    if pods.gpus:
        resources.setdefault("limits", {})["nvidia.com/gpu"] = pods.gpus
    mounts = [{"name": "memory", "mountPath": "/dev/shm"}]
    volumes = [{"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": topology.engine.kubernetes.shared_memory}}]
    container = {**_container(topology, name, ["zmqtrain", "agent"], mounts, first), "resources": resources}
    backoff = REPLACEMENTS * len(pods.hosts) if topology.elastic else 0
    return _job(topology, pods.name, len(pods.hosts), container, volumes, backoff=backoff)


def _container(
    topology: Topology, name: str, command: list[str], mounts: list[dict[str, Any]], host: Host | None = None
) -> dict[str, Any]:
    def label(key: str) -> dict[str, Any]:
        return {"fieldRef": {"fieldPath": _LABELS.format(key)}}

    told: dict[str, Mapping[str, Any]] = {
        "JOBSET_NAME": label(_OF_JOBSET.format("jobset-name")),
        "REPLICATED_JOB_NAME": label(_OF_JOBSET.format("replicatedjob-name")),
        "JOB_INDEX": label(_OF_JOBSET.format("job-index")),
        "JOB_COMPLETION_INDEX": {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}},
        "POD_IP": {"fieldRef": {"fieldPath": "status.podIP"}},
        TOKEN: {"secretKeyRef": {"name": f"{name}-token", "key": "token"}},
    }
    given = {
        "MASTER_PORT": str(_port(topology)),
        "ZMQTRAIN_WAIT": f"{topology.engine.wait:g}",
        ON_TERM: "checkpoint",
        **({} if host is None else host.environment),
    }
    return {
        "name": "zmqtrain",
        "image": topology.engine.kubernetes.image,
        "workingDir": topology.engine.kubernetes.folder,
        "command": command,
        "env": [
            *({"name": key, "valueFrom": value} for key, value in told.items()),
            *({"name": key, "value": value} for key, value in given.items()),
        ],
        "volumeMounts": mounts,
    }


def _job(
    topology: Topology, name: str, count: int, container: dict[str, Any], volumes: list[dict[str, Any]], *, backoff: int
) -> dict[str, Any]:
    timeouts = topology.job.timeouts
    exit_codes = {"containerName": container["name"], "operator": "In", "values": list(PERMANENT)}
    return {
        "name": name,
        "replicas": 1,
        "template": {
            "spec": {
                "completionMode": "Indexed",
                "completions": count,
                "parallelism": count,
                "backoffLimit": backoff,
                "podFailurePolicy": {
                    "rules": [
                        {"action": "FailJob", "onExitCodes": exit_codes},
                        # A drained node, or one that a more important pod has taken, does not count as a failure.
                        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    ]
                },
                "template": {
                    "spec": {
                        "restartPolicy": "Never",
                        "terminationGracePeriodSeconds": math.ceil(2 * timeouts.grace_s + 2 * timeouts.flush_s),
                        "enableServiceLinks": False,
                        "containers": [container],
                        "volumes": volumes,
                    }
                },
            }
        },
    }
