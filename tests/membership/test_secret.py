"""The token, and lines that it seals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zmqtrain.errors import ProtocolError, RunTokenError, UsageError
from zmqtrain.launcher.environment.sealed import Seal
from zmqtrain.membership.secret import read_token, run_token, write_token

TOKEN = "0123456789abcdef"


def test_where_the_token_comes_from(tmp_path: Path) -> None:
    assert read_token({}) is None
    assert read_token({"ZMQTRAIN_TOKEN": TOKEN}) == TOKEN
    written = write_token(tmp_path / "token")
    assert len(written) == 64
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert read_token({"ZMQTRAIN_TOKEN_FILE": str(tmp_path / "token")}) == written
    assert read_token({"ZMQTRAIN_TOKEN": TOKEN, "ZMQTRAIN_TOKEN_FILE": "/nowhere"}) == TOKEN


def test_what_is_no_good_secret(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can be guessed"):
        read_token({"ZMQTRAIN_TOKEN": "short"})
    with pytest.raises(UsageError, match="cannot be read"):
        read_token({"ZMQTRAIN_TOKEN_FILE": str(tmp_path / "none")})
    path = tmp_path / "token"
    write_token(path)
    os.chmod(path, 0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_token({"ZMQTRAIN_TOKEN_FILE": str(path)})


def test_each_run_has_a_token_of_its_own() -> None:
    tokens = {run_token(TOKEN, "a"), run_token(TOKEN, "b"), run_token(TOKEN + "x", "a"), TOKEN}
    assert len(tokens) == 4
    assert run_token(TOKEN, "a") == run_token(TOKEN, "a")


def pair(theirs: str = TOKEN) -> tuple[Seal, Seal]:
    return Seal(TOKEN, "1", "2", launcher=True), Seal(theirs, "1", "2", launcher=False)


def test_sealed_lines_are_read_in_order() -> None:
    launcher, node = pair()
    for number in range(3):
        assert node.read(launcher.write(number=number), "the launcher") == {"number": number}
        assert launcher.read(node.write(answer=number), "the node") == {"answer": number}


def test_another_token_is_refused_on_both_sides() -> None:
    launcher, node = pair("another token entirely")
    with pytest.raises(RunTokenError, match=r"10\.0\.0\.7"):
        launcher.read(node.write(description=1), "10.0.0.7")
    with pytest.raises(RunTokenError):
        node.read(launcher.write(welcome="alpha"), "the launcher")


@pytest.mark.parametrize("change", ["changed", "again", "left out", "turned round", "of another conversation"])
def test_nothing_can_be_changed_repeated_or_left_out(change: str) -> None:
    launcher, node = pair()
    first, second = launcher.write(start=1), launcher.write(stop=0)
    line = first
    if change == "changed":
        line = first.replace(b"start", b"stops")
    elif change == "again":
        node.read(first, "the launcher")
    elif change == "left out":
        line = second
    elif change == "turned round":
        line = node.write(start=1)
    else:
        line = Seal(TOKEN, "1", "3", launcher=True).write(start=1)
    with pytest.raises(RunTokenError):
        node.read(line, "the launcher")


@pytest.mark.parametrize("line", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"\n"])
def test_another_language(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not follow this protocol"):
        pair()[0].read(line, "it")
