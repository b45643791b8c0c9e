"""Commands about runs say what they found, and what to do where they found nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqtrain.cli.attach import run_attach
from zmqtrain.cli.dashboard import run_dashboard
from zmqtrain.cli.runs import run_logs, state_of_run
from zmqtrain.errors import HostLostError, UsageError


def test_logs_of_roles_that_have_printed_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "topology.toml").write_text("[job]\n")
    assert run_logs(str(tmp_path)) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"the roles of {tmp_path} have printed nothing\n"


@pytest.mark.parametrize("torn", ["", '{"status": "do', "[]", "{}"])
def test_a_run_whose_summary_cannot_be_read_has_not_ended(tmp_path: Path, torn: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "topology.toml").write_text("[job]\n")
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "summary.json").write_text(torn)
    assert state_of_run(tmp_path)["status"] == "lost"
    with pytest.raises(HostLostError, match="has ended without finishing the run"):
        run_attach(str(tmp_path))


def test_an_address_of_another_machine_is_not_said_to_be_a_busy_port(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot listen on --address 192\.0\.2\.1: .*\. Choose an address of this machine"):
        run_dashboard(str(tmp_path), address="192.0.2.1", port=None)
