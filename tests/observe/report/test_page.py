"""The page: one file that needs nothing else, whatever is in the run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from zmqtrain.cli.report import run_report
from zmqtrain.errors import UsageError
from zmqtrain.observe.report.page import page
from zmqtrain.observe.report.read import read_run


class Parser(HTMLParser):
    """Collects scripts and what tags refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.references: list[str] = []
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_script = tag == "script"
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False


def make_run(folder: Path, *, broken: bool = False) -> Path:
    folder.mkdir()
    (folder / "topology.toml").write_text("")
    lines = [
        json.dumps(
            {"time": 1.0 + n, "role": "worker", "rank": 0, "step": n, "kind": "step", "values": {"loss": 1.0, "seconds": 0.5}}
        )
        for n in range(3)
    ]
    (folder / "events.jsonl").write_text("\n".join([*lines, *(['{"time": 1'] if broken else [])]))
    (folder / "summary.json").write_text(json.dumps({"status": "failed", "world": "real", "steps": 3, "hosts": ["</script><b>"]}))
    (folder / "error.json").write_text(
        json.dumps({"peer": "worker/0", "type": "TaskError", "message": "<wrong>", "verdict": "user code"})
    )
    return folder


def test_the_page_is_whole_and_refers_to_nothing(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name)) for name in ("first-001", "second-001")]
    text = page(runs)
    parser = Parser()
    parser.feed(text)
    data, program = parser.scripts
    assert json.loads(data) == json.loads(json.dumps(runs))
    assert parser.references == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "function chart" in program
    assert program.count("{") == program.count("}")


def test_a_broken_line_is_left_out_and_said(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run-001", broken=True))
    assert len(run["loss"]["mean"]) == 3
    assert run["notes"] == ["1 line of events.jsonl left out: not readable (the first: line 4)"]


def test_the_command_writes_into_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run-001")
    assert run_report([str(run)]) == 0
    assert (run / "report.html").stat().st_size > 10_000
    assert "report.html" in capsys.readouterr().out
    assert run_report([str(run)], json_lines=True) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["status"] == "failed"
    with pytest.raises(UsageError, match=r"cannot write .*Choose another file with --output"):
        run_report([str(run)], output=tmp_path / "missing" / "page.html")
    with pytest.raises(UsageError, match="there is no run"):
        run_report(["nothing"])
