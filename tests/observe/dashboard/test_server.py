"""What the dashboard's server answers, and to whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.observe.dashboard.runs import make_run
from zmqtrain.errors import UsageError
from zmqtrain.observe.dashboard.server import make_app

TOKEN = "a-token"
ORIGIN = {"origin": "http://testserver"}


class Control:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def state(self, path: Path) -> dict[str, Any]:
        return {"status": "done", "steps": 5, "seconds": 9.0}

    def stop(self, path: Path) -> str:
        self.asked.append(f"stop {path.name}")
        return "it stops"

    def checkpoint(self, path: Path) -> str:
        raise UsageError("a script keeps its own")

    def drain(self, path: Path, host: str) -> str:
        self.asked.append(f"drain {host} of {path.name}")
        return "it has left"


@pytest.fixture
def control() -> Control:
    return Control()


@pytest.fixture
def stranger(tmp_path: Path, control: Control) -> Iterator[TestClient]:
    make_run(tmp_path)
    make_run(tmp_path, "digits-002")
    with TestClient(make_app(tmp_path, control, TOKEN), follow_redirects=False) as client:
        yield client


@pytest.fixture
def client(stranger: TestClient) -> TestClient:
    """With the token."""
    answer = stranger.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/"), "the token leaves the address at once"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    return stranger


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/api/runs/digits-001", "/?token=wrong"])
def test_nothing_is_shown_without_the_token(stranger: TestClient, path: str) -> None:
    answer = stranger.get(path)
    assert answer.status_code == 403
    assert "token" in answer.text
    assert stranger.post("/api/runs/digits-001/stop", headers=ORIGIN).status_code == 403


def test_the_page_needs_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    files = [part.split('"')[0] for mark in ('src="', 'href="') for part in page.text.split(mark)[1:]]
    files = [file for file in files if file.startswith("/")]
    assert len(files) == 5
    for file in files:
        answer = client.get(file)
        assert answer.status_code == 200
        assert answer.content
    assert client.get("/static/../server.py").status_code == 404
    assert client.get("/static/%2e%2e/server.py").status_code == 404


def test_runs_and_their_state(client: TestClient) -> None:
    assert {run["name"] for run in client.get("/api/runs").json()} == {"digits-001", "digits-002"}
    state = client.get("/api/runs/digits-001").json()
    assert (state["name"], state["groups"], state["status"]["status"], state["reading"]) == ("digits-001", 2, "done", False)
    assert state["loss"]["step"] == [0, 1, 2, 3, 4]
    assert state["eval"]["accuracy"]["value"] == [0.75]
    assert [each["peer"] for each in state["slow"]] == ["worker/1"]
    assert [(each["peer"], each["busy"], each["messages_per_s"]) for each in state["servers"]] == [("server/0", 0.25, 5.0)]
    assert client.get("/api/runs/nothing").status_code == 404
    assert client.get("/api/runs/..").status_code == 404


def test_the_stream_of_a_run_that_has_ended_ends(client: TestClient) -> None:
    def events(text: str) -> list[tuple[str, Any]]:
        blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in text.strip().split("\n\n")]
        return [(block["event"], json.loads(block["data"])) for block in blocks]

    found = events(client.get("/api/runs/digits-001/stream").text)
    assert [kind for kind, _ in found] == [*["feed"] * 5, "state", "end"]
    note = next(value for kind, value in found if kind == "feed" and value["kind"] == "note")
    assert note["text"] == "<b>kept</b> & done"
    again = events(client.get("/api/runs/digits-001/stream", headers={"last-event-id": str(note["n"])}).text)
    assert [value["kind"] for kind, value in again if kind == "feed"] == ["ended"], "only what is new"


def test_logs_are_read_on_from_where_they_were(client: TestClient) -> None:
    first = client.get("/api/runs/digits-001/logs/worker/0").json()
    assert first["text"] == "hello\nfrom worker 0\n"
    assert client.get(f"/api/runs/digits-001/logs/worker/0?from={first['next']}").json()["text"] == ""
    assert client.get("/api/runs/digits-001/logs/..%2f..%2fpid").status_code == 404


def test_only_the_own_page_changes_a_run(client: TestClient, control: Control) -> None:
    stop = "/api/runs/digits-001/stop"
    assert client.get(stop).status_code == 405
    for headers in ({}, {"origin": "http://127.0.0.1:9"}, {"origin": "null"}):
        assert client.post(stop, headers=headers).status_code == 403
    assert not control.asked
    assert client.post(stop, headers=ORIGIN).json() == {"said": "it stops"}
    assert control.asked == ["stop digits-001"]
    refused = client.post("/api/runs/digits-001/checkpoint", headers=ORIGIN)
    assert (refused.status_code, refused.json()) == (409, {"error": "a script keeps its own"})
    assert client.post("/api/runs/digits-001/other", headers=ORIGIN).status_code == 404
    assert client.post("/api/runs/digits-001/drain?host=b", headers=ORIGIN).json() == {"said": "it has left"}
    assert control.asked[-1] == "drain b of digits-001"


def test_events_that_are_added_are_read_on(client: TestClient, tmp_path: Path) -> None:
    before = client.get("/api/runs/digits-001").json()
    event = {"time": 120.0, "host": "a", "role": "worker", "rank": 0, "step": 5, "kind": "step", "values": {"loss": 9.0}}
    with (tmp_path / "digits-001" / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n" + '{"time": 1')
    after = client.get("/api/runs/digits-001").json()
    assert after["loss"]["value"] == [*before["loss"]["value"], 9.0]
    assert after["broken"] == 0, "a line that is being written is not broken"
