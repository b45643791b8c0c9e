"""The JobSet of a topology: its structure, and that its pods' commands train."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.launcher.environment.nodes import TOKEN, Nodes, free_port
from tests.launcher.ready import warm
from zmqtrain.errors import UsageError
from zmqtrain.launcher.forkserver import ADOPTED
from zmqtrain.launcher.kubernetes.manifest import PERMANENT, manifests
from zmqtrain.launcher.kubernetes.yaml_writer import write_yaml
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.schema import Topology

ROOT = Path(__file__).parents[3]
PLAIN = "[job]\ntask = 't.py'\n[engine]\nkind = 'kubernetes'\n[engine.kubernetes]\nimage = 'zt:1'\n"

#: Keys of the JobSet API (v1alpha2), of Jobs (batch/v1) and of pods (v1), as far as we use them. ``*``: any.
JOB: dict[str, Any] = {
    "completionMode": ..., "completions": ..., "parallelism": ..., "backoffLimit": ...,
    "podFailurePolicy": {"rules": [{
        "action": ..., "onExitCodes": {"containerName": ..., "operator": ..., "values": [...]},
        "onPodConditions": [{"type": ..., "status": ...}],
    }]},
    "template": {"spec": {
        "restartPolicy": ..., "terminationGracePeriodSeconds": ..., "enableServiceLinks": ...,
        "containers": [{
            "name": ..., "image": ..., "workingDir": ..., "command": [...],
            "env": [{"name": ..., "value": ..., "valueFrom": {
                "fieldRef": {"fieldPath": ...}, "secretKeyRef": {"name": ..., "key": ...},
            }}],
            "ports": [{"name": ..., "containerPort": ...}],
            "resources": {"requests": {"*": ...}, "limits": {"*": ...}},
            "volumeMounts": [{"name": ..., "mountPath": ..., "readOnly": ...}],
        }],
        "volumes": [{
            "name": ..., "configMap": {"name": ...}, "emptyDir": {"medium": ..., "sizeLimit": ...},
            "persistentVolumeClaim": {"claimName": ...},
        }],
    }},
}  # fmt: skip
JOBSET: dict[str, Any] = {
    "apiVersion": ..., "kind": ..., "metadata": {"name": ..., "namespace": ..., "labels": {"*": ...}},
    "spec": {
        "network": {"enableDNSHostnames": ..., "subdomain": ..., "publishNotReadyAddresses": ...},
        "successPolicy": {"operator": ..., "targetReplicatedJobs": [...]},
        "failurePolicy": {
            "maxRestarts": ..., "restartStrategy": ...,
            "rules": [{"name": ..., "action": ..., "onJobFailureReasons": [...], "targetReplicatedJobs": [...]}],
        },
        "replicatedJobs": [{"name": ..., "replicas": ..., "template": {"spec": JOB}}],
    },
}  # fmt: skip


def foreign(value: Any, allowed: Any, path: str = "") -> list[str]:
    """The keys of a value that the API does not have."""
    if isinstance(value, dict) and isinstance(allowed, dict):
        found = []
        for key, item in value.items():
            if key not in allowed and "*" not in allowed:
                found.append(f"{path}.{key}")
            else:
                found += foreign(item, allowed.get(key, ...), f"{path}.{key}")
        return found
    if isinstance(value, list) and isinstance(allowed, list):
        return [name for item in value for name in foreign(item, allowed[0], f"{path}[]")]
    return [] if allowed is ... and not isinstance(value, dict | list) else [f"{path} has another form"]


def rendered(text: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Secret, ConfigMap and JobSet, as somebody who reads YAML sees them."""
    secret, topology, jobset = yaml.safe_load_all(write_yaml(*manifests(parse_topology(text), token=TOKEN)))
    assert [document["kind"] for document in (secret, topology, jobset)] == ["Secret", "ConfigMap", "JobSet"]
    return secret, topology, jobset


def jobs_of(jobset: dict[str, Any]) -> dict[str, Any]:
    return {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}


def test_the_shipped_manifest_is_that_of_the_shipped_file() -> None:
    assert (ROOT / "launch" / "jobset.yaml").read_text() == runpy.run_path(str(ROOT / "docs" / "make_jobset.py"))["manifest"](), (
        "run `make docs`"
    )


def test_the_structure_is_that_of_the_api() -> None:
    text = (ROOT / "launch" / "kubernetes.toml").read_text()
    secret, topology, jobset = rendered(text.replace('kind = "kubernetes"', 'kind = "kubernetes"\nwait = "20 min"'))
    assert foreign(jobset, JOBSET) == []
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    jobs = jobs_of(jobset)
    assert {name: job["completions"] for name, job in jobs.items()} == {"launcher": 1, "workers": 2, "servers": 1}
    # Groups of one worker go on without a lost pod, and take in the one that replaces it.
    assert {name: job["backoffLimit"] for name, job in jobs.items()} == {"launcher": 0, "workers": 20, "servers": 10}
    for job in jobs.values():
        assert job["completionMode"] == "Indexed"
        codes, disruption = job["podFailurePolicy"]["rules"]
        assert codes["onExitCodes"]["values"] == sorted({2, 3, *range(64, 128)}) == list(PERMANENT)
        assert (codes["action"], disruption["action"]) == ("FailJob", "Ignore")
        pod = job["template"]["spec"]
        assert pod["restartPolicy"] == "Never"  # what a podFailurePolicy needs
        assert pod["terminationGracePeriodSeconds"] > 20
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        names = [variable["name"] for variable in container["env"]]
        assert len(names) == len(set(names))
        token = next(variable for variable in container["env"] if variable["name"] == "ZMQTRAIN_TOKEN")
        assert token["valueFrom"]["secretKeyRef"] == {"name": secret["metadata"]["name"], "key": "token"}
    spec = jobset["spec"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["launcher"]
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", spec["failurePolicy"]["rules"][0]["name"])
    assert secret["stringData"] == {"token": TOKEN}
    loaded = parse_topology(topology["data"]["topology.toml"])
    assert [(host.name, host.slots) for host in loaded.hosts] == [("workers-0", 2), ("workers-1", 2), ("servers-0", 1)]
    assert (loaded.job.name, loaded.engine.wait, loaded.job.port) == ("digits", 1200.0, 29400)


def test_settings_of_pods() -> None:
    more = "namespace = 'lab'\nfolder = '/code'\nclaim = 'disk'\nrestarts = 0\nmemory = '2 GiB'\nshared_memory = '64 MiB'\n"
    hosts = "[[hosts]]\nname = 'gpu-[0-1]'\nslots = 4\ndevices = ['cuda:0', 'cuda:1']\nenvironment = { A = 'b' }\n"
    secret, topology, jobset = rendered(PLAIN + more + hosts + "[compute]\ngroups = 2\n")
    assert {document["metadata"]["namespace"] for document in (secret, topology, jobset)} == {"lab"}
    assert foreign(jobset, JOBSET) == []
    jobs = jobs_of(jobset)
    pod = jobs["gpu"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": 4, "memory": 2 * 2**30},
        "limits": {"memory": 2 * 2**30, "nvidia.com/gpu": 2},
    }
    assert {"name": "A", "value": "b"} in container["env"]
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": 64 * 2**20}
    launcher = jobs["launcher"]["template"]["spec"]
    assert launcher["volumes"][1]["persistentVolumeClaim"] == {"claimName": "disk"}
    assert launcher["containers"][0]["volumeMounts"][1]["mountPath"] == "/code/runs"
    assert launcher["containers"][0]["command"][-2:] == ["runs/job", "--continue"]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 0


def test_without_hosts_each_role_has_a_pod() -> None:
    compute = "[compute]\ngroups = 2\ngroup_size = 2\nthreads = 3\n[exchange]\nshards = 2\n[job.args]\n"
    _, topology, jobset = rendered(PLAIN + compute)
    assert {name: job["completions"] for name, job in jobs_of(jobset).items()} == {"launcher": 1, "workers": 4, "servers": 2}
    loaded = parse_topology(topology["data"]["topology.toml"])
    assert [host.slots for host in loaded.hosts] == [3, 3, 3, 3, 1, 1]


def test_pods_of_an_elastic_run_are_replaced() -> None:
    _, _, jobset = rendered(PLAIN + "[compute]\ngroups = 2\n[exchange]\nkind = 'gossip'\n")
    assert {name: job["backoffLimit"] for name, job in jobs_of(jobset).items()} == {"launcher": 0, "workers": 20}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PLAIN.replace("image = 'zt:1'", ""), "image is missing"),
        (PLAIN + "[[hosts]]\nname = 'alpha'\n", "not the name of a pod"),
        (PLAIN + "[[hosts]]\nname = 'w-[1-2]'\n", "numbered from 0"),
        (PLAIN + "[[hosts]]\nname = 'launcher-0'\n", 'none of them "launcher"'),
        (PLAIN + "[[hosts]]\nname = 'w-0'\nslots = 1\n[[hosts]]\nname = 'w-1'\nslots = 2\n", "differ in slots"),
    ],
)
def test_what_no_pods_can_be_made_of(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        manifests(parse_topology(text), token=TOKEN)
    assert message in str(caught.value)


@pytest.mark.parametrize(("job", "name"), [("My_Run.2", "my-run-2"), ("7", "z7"), ("a" * 60, "a" * 20), ("_", "z")])
def test_names_that_kubernetes_allows(job: str, name: str) -> None:
    values = {"job": {"name": job}, "engine": {"kind": "kubernetes", "kubernetes": {"image": "i"}}}
    assert manifests(Topology.from_dict(values), token=TOKEN)[2]["metadata"]["name"] == name


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["a", "on", "1", "a b", "#", "- x"]), VALUES, min_size=1, max_size=4))
def test_what_is_written_is_read_again(document: dict[str, Any]) -> None:
    assert yaml.safe_load(write_yaml(document)) == document


def test_the_pods_train(tmp_path: Path) -> None:
    """Each pod's command, with the variables that a JobSet gives it. Pods have no names here, so they are told the address."""
    port = free_port()
    text = (ROOT / "launch" / "kubernetes.toml").read_text()
    text = text.replace(
        "epochs = 20", f'epochs = 3\nname = "digits"\ntimeout = "20 s"\nport = {port}\ntransport_encryption = "required"'
    )
    text = text.replace('name = "digits"\ntask', "task")
    _, topology, jobset = rendered(text)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "topology.toml").write_text(topology["data"]["topology.toml"])
    pods = []
    with warm() as started, Nodes(tmp_path) as nodes:
        for job, spec in jobs_of(jobset).items():
            container = spec["template"]["spec"]["containers"][0]
            for index in range(spec["completions"]):
                name = f"{job}-{index}"
                pods.append(name)
                program, *command = (word.replace("/etc/zmqtrain", str(tmp_path)) for word in container["command"])
                assert program == "zmqtrain"
                environ = environment_of(container, jobset["metadata"]["name"], job, index, port, len(pods))
                nodes.start(name, command, {**environ, ADOPTED: started.variables[ADOPTED]})
        assert {name: nodes.end(name) for name in pods} == dict.fromkeys(pods, 0), nodes
        nodes.all_gone()
        summary = json.loads((tmp_path / "runs" / "digits" / "summary.json").read_text())
        assert (summary["status"], summary["encrypted"]) == ("done", True)
        assert summary["hosts"] == ["workers-0", "workers-1", "servers-0"]
        resolved = parse_topology((tmp_path / "runs" / "digits" / "topology.toml").read_text())
        assert [host.address for host in resolved.hosts] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
        events = [json.loads(line) for line in (tmp_path / "runs" / "digits" / "events.jsonl").read_text().splitlines()]
        joined = {event["values"]["peer"]: event["values"]["host"] for event in events if event["kind"] == "join"}
        assert (joined["worker/0"], joined["worker/1"], joined["server/0"]) == ("workers-0", "workers-1", "servers-0")
        assert summary["eval"]["eval_accuracy"] > 0.3
        assert math.isfinite(summary["eval"]["eval_loss"])


def environment_of(container: dict[str, Any], jobset: str, job: str, index: int, port: int, number: int) -> dict[str, str]:
    """What the kubelet makes of a pod's ``env``."""
    fields = {
        "metadata.labels['jobset.sigs.k8s.io/jobset-name']": jobset,
        "metadata.labels['jobset.sigs.k8s.io/replicatedjob-name']": job,
        "metadata.labels['jobset.sigs.k8s.io/job-index']": "0",
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "status.podIP": f"127.0.0.{number}",
    }
    environ = {"ZMQTRAIN_COORDINATOR": f"127.0.0.1:{port}", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            environ[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" not in source:
            environ[variable["name"]] = variable["value"]
    return environ
