"""The parts of ssh launches that need no network: words for ssh, versions, folders, addresses."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from zmqtrain.errors import SshError, UsageError
from zmqtrain.launcher.addresses import address_towards, addresses_towards, endpoint_at, listening_address
from zmqtrain.launcher.ssh import clients
from zmqtrain.launcher.ssh.inspection import Fault, faults_of_versions, table
from zmqtrain.launcher.ssh.pack import MOST_FILES, pack, program_files, require_inside
from zmqtrain.launcher.ssh.places import LeftPlaces
from zmqtrain.launcher.ssh.preflight import MOST_TRIED, next_ones
from zmqtrain.launcher.ssh.remote import MARK
from zmqtrain.launcher.ssh.session import _no_greeting, _parse
from zmqtrain.launcher.ssh.target import Target, options_as_config, remote_command, remote_program, system_arguments
from zmqtrain.membership.environment import RoleEnvironment
from zmqtrain.topology.job import Job
from zmqtrain.topology.load import parse_topology

HOST = """
[job]
[engine]
kind = "ssh"
[[hosts]]
name = "beta"
address = "10.0.0.2"
slots = 1
"""
OURS = {"python": "3.11.2", "zmqtrain": "0.1.0", "torch": "2.4.0+cpu"}

# What ssh is told --------------------------------------------------------------------------------------------------------------


def target(lines: str = "") -> Target:
    return Target.of(parse_topology(HOST + lines).hosts[0], "/opt/python")


def test_a_plain_host_is_left_to_the_users_configuration() -> None:
    plain = target()
    words = system_arguments(plain, connect_s=20)
    assert words[0] == "ssh"
    assert "BatchMode=yes" in words
    assert not {"-l", "-p", "-J"} & set(words)
    assert words[-3:-1] == ["--", "10.0.0.2"]
    assert plain.by_hand == "ssh 10.0.0.2"
    assert Target.from_dict(plain.to_dict()) == plain


def test_what_the_file_says_goes_before() -> None:
    lines = 'python = "~/my env/python"\nssh = { host = "lab", user = "me", port = 2222, jump = "gate:22", options = '
    host = target(lines + '{ IdentityFile = "~/.ssh/key", ServerAliveInterval = "5" } }\n')
    words = system_arguments(host, connect_s=20)
    for flag, value in (("-l", "me"), ("-p", "2222"), ("-J", "gate:22")):
        assert words[words.index(flag) + 1] == value
    assert "IdentityFile=~/.ssh/key" in words
    assert "ServerAliveInterval=5" in words
    assert "ServerAliveInterval=15" not in words
    assert words[-2] == "lab"
    # Only about this host: those on the way to it have their own.
    assert options_as_config(host) == "Host lab\n  IdentityFile ~/.ssh/key\n  ServerAliveInterval 5\n"
    assert host.by_hand == ("ssh -J gate:22 -p 2222 -o 'IdentityFile=~/.ssh/key' -o ServerAliveInterval=5 me@lab")


@pytest.mark.parametrize("shell", ["sh", "bash", "dash"])
def test_every_shell_runs_the_remote_program(tmp_path: Path, shell: str) -> None:
    link = tmp_path / "a b's" / "python"
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    for python in (str(link), "~/a b's/python"):
        done = subprocess.run(
            [shell, "-c", remote_command(python)],
            input=remote_program(),
            capture_output=True,
            env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
            check=False,
        )
        assert done.returncode == 0, done
        answer = _parse(done.stdout.splitlines()[0])
        assert answer is not None
        assert answer["hello"].startswith("3.")


def test_the_remote_program_needs_nothing_of_ours() -> None:
    """It runs where zmqtrain is not, and is not what it says of itself there."""
    check = {"do": "check", "number": 1, "packages": ["zmqtrain", "msgpack"], "folder": None, "files": []}
    command = [sys._base_executable, "-I", "-S", "-c", shlex.split(remote_command("python"))[-1]]  # type: ignore[attr-defined]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(remote_program())
        process.stdin.flush()
        assert b"hello" in process.stdout.readline()  # requests come after this
        process.stdin.write(json.dumps(check).encode() + b"\n")
        process.stdin.flush()
        answer = _parse(process.stdout.readline())
        process.stdin.close()
        assert answer is not None
        assert answer["packages"] == {"zmqtrain": None, "msgpack": None}
    assert process.returncode == 0


def test_words_of_a_login_shell_are_no_answers() -> None:
    assert _parse(b"Welcome to the cluster\n") is None
    assert _parse(b"$ " + MARK.encode() + b'{"hello": "3.11"}\n') == {"hello": "3.11"}
    assert _parse(MARK.encode() + b"{broken\n") is None


@pytest.mark.parametrize(
    ("status", "said", "words", "lasting"),
    [
        (127, "sh: 1: /opt/python: not found", "there is no Python at /opt/python", True),
        (1, 'File "<string>"\nSyntaxError: invalid syntax', "/opt/python is too old", True),
        (255, "me@beta: Permission denied (publickey).", "cannot log in: me@beta: Permission denied", True),
        (255, "ssh: connect to host beta port 22: Connection refused", "Connection refused", False),
        (1, "This account is currently not available.", "did not run (exit code 1): This account", True),
        (None, "", "cannot log in", False),
    ],
)
def test_why_python_did_not_run(status: int | None, said: str, words: str, lasting: bool) -> None:
    error = _no_greeting(target(), status, said)
    assert words in error.reason
    assert error.remedy
    assert error.lasting is lasting


def test_without_the_library_the_systems_ssh_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "find_spec", lambda name: None)
    assert type(clients.make_client("auto")).__name__ == "SystemClient"
    with pytest.raises(UsageError, match=r"pip install zmqtrain\[ssh\]"):
        clients.make_client("asyncssh")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="no ssh command here"):
        clients.make_client("auto")


# What hosts have ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("python", "zmqtrain", "torch", "faults"),
    [
        ("3.11.9", "0.1.0", "2.4.0+cu121", []),
        ("3.12.1", "0.1.0", "2.4.0", ["Python 3.12.1, but this machine has 3.11.2"]),
        ("3.11.2", "0.2.0", "2.4.0", ["zmqtrain 0.2.0, but this machine has 0.1.0"]),
        ("3.11.2", "0.1.0", "2.5.0", ["torch 2.5.0, but this machine has 2.4.0+cpu"]),
        ("3.11.2", None, None, ["no zmqtrain", "no torch"]),
        ("3.11.2", "unknown", "2.4.0", []),
        ("2.7.18", None, "2.4.0", ["Python 2.7.18, but this machine has 3.11.2", "no zmqtrain"]),
    ],
)
def test_versions_that_do_not_agree(python: str, zmqtrain: str | None, torch: str | None, faults: list[str]) -> None:
    theirs = {"python": python, "packages": {"zmqtrain": zmqtrain, "torch": torch}}
    found = list(faults_of_versions("beta", OURS, theirs))
    assert [fault.what for fault in found] == faults
    assert all(fault.remedy for fault in found)


def test_what_to_install() -> None:
    theirs = {"python": "3.11.2", "packages": {"zmqtrain": "0.1.0", "torch": "2.5.0+cu121"}}
    (fault,) = faults_of_versions("beta", OURS, theirs)
    assert fault.remedy == "install the same version: pip install torch==2.4.0"


def test_all_faults_in_one_table() -> None:
    text = table([Fault("a", "no torch", "install it"), Fault("a", "no folder x", "sync"), Fault("long-name", "y", "z")], 4)
    assert text.splitlines() == [
        "2 of 4 hosts cannot take part:",
        "  host       problem      what to do",
        "  a          no torch     install it",
        "  a          no folder x  sync",
        "  long-name  y            z",
    ]


# The folder --------------------------------------------------------------------------------------------------------------------


def test_a_folder_is_packed_without_what_is_no_program(tmp_path: Path) -> None:
    kept = {"task.py": b"x = 1\n", "package/module.py": b"y\n", "data/small.bin": bytes(10)}
    left = (".git/config", "runs/a-001/x", "package/__pycache__/m.pyc", "env/pyvenv.cfg", "env/lib/x.py", "c/CACHEDIR.TAG")
    for name, data in kept.items() | dict.fromkeys(left, b"-").items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "package" / "same.py").symlink_to("module.py")
    (tmp_path / "passwords").symlink_to("/etc/passwd")
    (tmp_path / "etc").symlink_to("/etc")
    (tmp_path / "task.py").chmod(0o777)
    packed = pack(tmp_path, 1000)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive.getmembers()}  # type: ignore[union-attr]
        assert archive.getmember("task.py").mode == 0o755
        assert {member.uid for member in archive.getmembers()} == {0}
    assert found == {**kept, "package/same.py": b"y\n"}
    assert pack(tmp_path, 1000) == packed


def test_a_folder_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(7):
        (tmp_path / f"{number}.bin").write_bytes(bytes(2**20 * number))
    with pytest.raises(UsageError, match=r"21 MiB of .* sync_limit = 20 MiB. The largest: 6.bin \(6 MiB\), 5.bin") as caught:
        pack(tmp_path, 20 * 2**20)
    assert "1.bin" not in str(caught.value)
    monkeypatch.setattr("zmqtrain.launcher.ssh.pack.MOST_FILES", 6)
    with pytest.raises(UsageError, match="more than 6 files"):
        pack(tmp_path, 2**30)
    assert MOST_FILES > 1000


def test_files_that_a_copied_folder_would_not_have(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").touch()
    job = Job(task="mine.py:task", python_path=("lib",))
    assert program_files(job, "train.py", tmp_path) == ["train.py", "lib/mine.py"]
    assert program_files(Job(task="package.module:task"), None, tmp_path) == []
    require_inside(["train.py", "lib/../mine.py"], tmp_path)
    for name in ("../train.py", str(tmp_path / "train.py")):
        with pytest.raises(UsageError, match="launch in the folder that contains the file"):
            require_inside([name], tmp_path)


def test_places_are_known_until_they_are_clear(tmp_path: Path) -> None:
    places = LeftPlaces(tmp_path, "trial-001-abc", "/opt/python", ["a", "b"])
    places.forget("c")
    assert LeftPlaces.read(tmp_path) is None
    places.write()
    places.forget("a")
    again = LeftPlaces.read(tmp_path)
    assert again is not None
    assert (again.hosts, again.run, again.python) == (["b"], "trial-001-abc", "/opt/python")
    again.forget("b")
    assert LeftPlaces.read(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


# Addresses ---------------------------------------------------------------------------------------------------------------------


async def test_the_address_on_the_way_to_a_host() -> None:
    assert await address_towards("beta", "127.0.0.1") == "127.0.0.1"
    with pytest.raises(SshError, match=r"beta: its address no.such.name.invalid cannot be resolved here .*: correct it"):
        await address_towards("beta", "no.such.name.invalid")
    hosts = parse_topology(HOST).hosts
    assert await addresses_towards(hosts, "gate.lab") == {"beta": "gate.lab"}


def test_where_to_listen_and_what_to_tell() -> None:
    assert listening_address(["10.0.0.1", "192.168.0.1"]) == "0.0.0.0"
    assert listening_address(["10.0.0.1", "fd00::1"]) in ("::", "0.0.0.0")  # as this machine can
    assert endpoint_at("fd00::1", "tcp://[::]:4000,4001") == "tcp://[fd00::1]:4000,4001"
    assert endpoint_at("gate", "tcp://0.0.0.0:4000,4001") == "tcp://gate:4000,4001"


def test_a_host_listens_elsewhere_than_others_connect_to() -> None:
    environment = RoleEnvironment("worker/0", "tcp://x:1,2", "token", host="203.0.113.7", bind="0.0.0.0", ports=(29400, 29499))
    again = RoleEnvironment.from_environ(environment.to_environ())
    assert again == environment
    assert (again.settings().host, again.settings().advertise) == ("0.0.0.0", "203.0.113.7")
    assert again.settings().ports == (29400, 29499)
    with pytest.raises(UsageError, match=r"ZMQTRAIN_PORTS is '29499-29400'; it must be a range"):
        RoleEnvironment.from_environ({**environment.to_environ(), "ZMQTRAIN_PORTS": "29499-29400"})
    plain = RoleEnvironment("worker/0", "tcp://x:1,2", "token", host="10.0.0.2").settings()
    assert (plain.host, plain.advertise) == ("10.0.0.2", "")  # the same


def test_of_many_hosts_each_tries_some() -> None:
    names = [f"n{number}" for number in range(MOST_TRIED + 10)]
    assert next_ones(names[:3], "n1") == ["n2", "n0"]
    tried = [name for one in names for name in next_ones(names, one)]
    assert {tried.count(name) for name in names} == {MOST_TRIED}


def test_shell_words_survive() -> None:
    assert shlex.split(remote_command("/a b/python"))[0] == "/a b/python"
