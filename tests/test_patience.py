"""A test that starts processes gets time, and one that does not is ended at the ordinary limit."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import LIMIT_S, Children, pytest_timeout_set_timer


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Callable[[], None], list[str]]]:
    """Lets the alarm of a test with a limit of 60 s ring, and what came of it."""
    noted: list[str] = []
    with monkeypatch.context() as patch:
        handlers: list[Any] = [lambda *_: noted.append("gave up")]
        patch.setattr(signal, "getsignal", lambda _: handlers[-1])
        patch.setattr(signal, "signal", lambda _, handler: handlers.append(handler))
        patch.setattr(signal, "setitimer", lambda _, seconds: noted.append(f"{seconds:.0f} s more"))
        setting: Any = pytest_timeout_set_timer(SimpleNamespace(), SimpleNamespace(timeout=60.0))  # type: ignore[arg-type]
        next(setting)
        with pytest.raises(StopIteration) as ended:
            setting.send(True)
        assert ended.value.value is True
        yield lambda: handlers[-1](signal.SIGALRM, None), noted


def test_without_processes_it_is_ended(ring: tuple[Callable[[], None], list[str]]) -> None:
    alarm, noted = ring
    alarm()
    assert noted == ["gave up"]


@pytest.mark.parametrize("gone", [True, False])
def test_with_processes_it_gets_time_once(ring: tuple[Callable[[], None], list[str]], gone: bool) -> None:
    alarm, noted = ring
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        if gone:
            process.communicate(b"\n")
        alarm()
        if not gone:
            process.communicate(b"\n")
    assert noted == [f"{LIMIT_S - 60:.0f} s more"]
    alarm()
    assert noted[1:] == ["gave up"]


def test_processes_of_before_are_not_its_own() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        children = Children()
        assert not children.started()
        process.communicate(b"\n")
