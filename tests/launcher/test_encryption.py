"""A real launch that encrypts: who does not belong to it stays outside, and nobody's keys show."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import zmq

from tests.launcher.launched import TOLD, Launched, told
from tests.patience import PATIENCE_S
from zmqtrain.net.address import key_in, split_address, without_key
from zmqtrain.net.curve import KeyPair

#: Without shared memory, so that what workers say to each other goes over sockets.
TOPOLOGY = """
[job]
name = "encrypted"
timeout = "20 s"
oversubscribe = true
transport_encryption = "required"
[compute]
shared_memory = false
group_size = 2
batch_size = 4
"""

SCRIPT = """
import os, pathlib, time, torch, zmqtrain
with zmqtrain.session() as session:
    print("ready", os.environ["ZMQTRAIN_COORDINATOR"] != "", flush=True)
    steps = 0
    while True:  # until both have seen that they may go: each may see it a step before the other
        go = torch.tensor([float(pathlib.Path("go").exists())])
        total = session.all_reduce(torch.ones(100_000))
        assert total.sum().item() == 200_000
        steps += 1
        session.report(loss=1.0 / steps)
        if session.all_reduce(go).item() == 2.0 and steps >= 5:
            break
        time.sleep(0.02)  # leaves the processors to the strangers
    print("steps", steps)
"""


def join(address: str, token: str) -> subprocess.CompletedProcess[str]:
    """An agent of somebody's who would like to take part."""
    said = {"ZMQTRAIN_PEER": "agent/localhost", "ZMQTRAIN_COORDINATOR": address, "ZMQTRAIN_TOKEN": token, "ZMQTRAIN_TIMEOUT": "3"}
    command = [sys.executable, "-m", "zmqtrain", "agent"]
    return subprocess.run(command, env={**os.environ, **said}, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_an_encrypted_run_among_strangers(tmp_path: Path) -> None:
    (tmp_path / "encrypted.toml").write_text(TOPOLOGY)
    (tmp_path / "script.py").write_text(TOLD + SCRIPT)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Launched(tmp_path, "encrypted.toml", "script.py") as run, ExitStack() as stack:
        stack.callback(context.term)
        run.wait_for("ready", times=2)
        coordinator, token = told(run)
        key = key_in(coordinator)
        assert key is not None
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        members = [event["values"]["address"] for event in events if event["kind"] == "join"]
        assert len(members) == 3
        for address in [coordinator, *members]:
            for target in split_address(address):
                with suppress(ConnectionError), socket.create_connection(("127.0.0.1", int(target.rpartition(":")[2])), 5) as raw:
                    raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
                for guessed in (None, key, KeyPair.new().public):  # in plain text, unknown, and for somebody else
                    dealer = stack.enter_context(context.socket(zmq.DEALER))
                    dealer.setsockopt(zmq.LINGER, 0)
                    if guessed is not None:
                        pair = KeyPair.new()
                        dealer.setsockopt(zmq.CURVE_SERVERKEY, guessed)
                        dealer.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
                        dealer.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
                    dealer.connect(target)
                    dealer.send(b"let me in")
        refused = join(coordinator, "guessed")
        assert refused.returncode == 65, refused.stderr
        assert "coordinator has another run token" in refused.stderr
        plain = join(without_key(coordinator), token)
        assert plain.returncode == 128, plain.stderr
        assert "accepts only encrypted connections" in plain.stderr
        arguments = [word for process in run.processes() if process.is_running() for word in process.cmdline()]
        (tmp_path / "go").touch()
        assert run.end() == 0, run
        summary = run.json("summary.json")
        assert (summary["status"], summary["encrypted"]) == ("done", True)
        assert "not admitted" in run.error_text  # the coordinator's own ports
        logs = "".join(path.read_text() for path in (run.run / "logs").iterdir())
        assert "not admitted" in logs  # the workers'
        left = "".join(path.read_text(errors="replace") for path in run.run.rglob("*") if path.is_file())
        shown = "".join([repr(run), left, *arguments, refused.stderr, plain.stderr])
        for secret in (token, key.hex(), KeyPair.of_token(token).secret.hex(), KeyPair.of_token(token).public.hex()):
            assert secret not in shown
