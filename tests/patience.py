"""How long a test may take, and wait for a process: one place, since a busy machine decides it and not the test.

A test without processes fails at the limit of pyproject.toml. One that has started processes gets `LIMIT_S` instead, without being
marked: whether it has is looked at when the ordinary limit is up.

The limit is an error that is raised wherever the test happens to be. One that ends none of it (a loop gives it to one of its tasks,
and C++ that waits never looks) ends with its process `LAST_S` later; where each thread was is printed.
"""

from __future__ import annotations

import faulthandler
import resource
import signal
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

#: Of a test that starts processes, in seconds: each imports torch, and other work may have the processors.
LIMIT_S = 600.0
#: From the end of the longest limit to that of the process, in seconds.
LAST_S = 60.0
#: Longest wait for a process or for what it says: the test can then still tell what it waited for.
PATIENCE_S = 200.0


class Children:
    """The processes that were started since this was made."""

    def __init__(self) -> None:
        self._alive, self._ended = _alive(), _ended()

    def started(self) -> bool:
        """Whether there have been any, gone or not."""
        return bool(_alive() - self._alive) or _ended() != self._ended


def _alive() -> set[int]:
    """Their numbers. Asked for by every test: psutil, which reads of every process on the machine, would take two milliseconds."""
    try:
        lists = [file.read_text() for file in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread has ended meanwhile
        lists = []
    if not lists:  # or this kernel does not tell
        return {child.pid for child in psutil.Process().children()}
    return {int(pid) for each in lists for pid in each.split()}


def _ended() -> tuple[int, int]:
    """Grows when a child has been waited for: no process runs without a page of memory."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_minflt, used.ru_majflt


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """Beside the timer of pytest-timeout, which is asked again once where the test has processes."""
    children = Children()
    # Where pytest keeps what is printed, `last_words` finds it.
    faulthandler.dump_traceback_later(max(LIMIT_S, settings.timeout or 0.0) + LAST_S, exit=True, file=2)  # type: ignore[arg-type]
    result = yield
    give_up: Any = signal.getsignal(signal.SIGALRM)
    if not callable(give_up) or settings.timeout >= LIMIT_S:
        return result  # another method than signals: its limit holds

    def rings(number: int, frame: FrameType | None) -> None:
        if children.started():
            signal.signal(signal.SIGALRM, give_up)
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S - settings.timeout)
        else:
            give_up(number, frame)

    signal.signal(signal.SIGALRM, rings)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Generator[None, object, object]:
    """The test has ended."""
    faulthandler.cancel_dump_traceback_later()
    return (yield)
