"""Limits on open files: raised as far as permitted, and named where that is not enough."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import zmq

from zmqtrain.errors import HostLimitError
from zmqtrain.net import open_files
from zmqtrain.net.open_files import PER_PEER, allow_open_files
from zmqtrain.net.zeromq import open_endpoint
from zmqtrain.wire.payload import Value


@contextmanager
def soft_limit(files: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_to_what_is_permitted() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with soft_limit(300):
        limit = allow_open_files()
        assert limit == min(hard, open_files.ENOUGH) > 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, hard)


def test_a_higher_limit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "ENOUGH", 280)
    with soft_limit(300):
        assert allow_open_files() == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300


def test_too_many_others_are_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "ENOUGH", 280)
    with soft_limit(300):
        allow_open_files(300 // PER_PEER)
        with pytest.raises(HostLimitError, match=r"connections to 61 other processes take at least 305 open files, .* 300"):
            allow_open_files(300 // PER_PEER + 1)


def take_all(taken: ExitStack) -> None:
    """Open files until there are no more."""
    with suppress(OSError):
        while True:
            taken.callback(os.close, os.open(os.devnull, os.O_RDONLY))


async def test_a_process_without_files_says_so_and_connects_once_it_has_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def echo(caller: str, value: Value) -> Value:
        return value

    monkeypatch.setattr(open_files, "ENOUGH", 0)  # nothing is raised
    async with open_endpoint("a", token="t") as a, open_endpoint("b", token="t") as b:
        b.serve("echo", echo)
        with caplog.at_level(logging.WARNING), soft_limit(len(os.listdir("/proc/self/fd"))), ExitStack() as taken:
            take_all(taken)
            a.add_peer("b", b.address)
            asked = asyncio.ensure_future(a.request("b", "echo", 7, timeout=60))
            async with asyncio.timeout(60):
                while not caplog.records:
                    take_all(taken)  # what other tests have left may be closed only now
                    await asyncio.sleep(0.01)
            assert not asked.done()
            assert "a cannot connect to b" in caplog.text
            assert "as many files open as it may" in caplog.text
        assert (await asked).meta == 7


async def test_a_socket_that_cannot_connect_for_want_of_files_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its monitor is closed before it, as ZeroMQ wants it."""

    async def echo(caller: str, value: Value) -> Value:
        return value

    left = [3]
    connect = zmq.Socket.connect

    def failing(self: zmq.Socket[bytes], address: str) -> object:
        if address.startswith("tcp://") and left[0]:
            left[0] -= 1
            raise zmq.ZMQError(errno.EMFILE)
        return connect(self, address)

    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
    async with open_endpoint("a", token="t") as a, open_endpoint("b", token="t") as b:
        b.serve("echo", echo)
        monkeypatch.setattr(zmq.Socket, "connect", failing)
        a.add_peer("b", b.address)
        async with asyncio.timeout(60):
            assert (await a.request("b", "echo", 7, timeout=60)).meta == 7
    assert (left, errors) == ([0], [])
