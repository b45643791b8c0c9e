"""One process from which the fork servers of several agents come."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from tests.launcher.test_forkserver import start
from zmqtrain.errors import HostLostError
from zmqtrain.launcher.forkserver import ADOPTED, ForkServer, channel_at
from zmqtrain.launcher.zygote import RUNNING, Zygote

ENTRY = "forked_entries:main"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "roles"), prepend=os.pathsep)
    return monkeypatch


async def test_agents_have_servers_of_their_own_in_their_environment(environment: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(30), Zygote(ENTRY) as zygote, AsyncExitStack() as stack:
        servers = []
        for name in ("one", "other"):
            environment.setenv("WHO", name)
            environment.setenv(ADOPTED, str(zygote.channel().detach()))
            servers.append(await stack.enter_async_context(ForkServer(ENTRY)))
        printed = [await (await start(server, DO="print")).end() for server in servers]
        assert [text for _, text, _ in printed] == [
            f"to standard output\nto standard error of {name}\n" for name in ("one", "other")
        ]
        first, second = [psutil.Process(await server.pid()) for server in servers]
        assert {first.ppid(), second.ppid()} == {zygote.pid}
        sleeper = await start(servers[0], DO="sleep")
        await sleeper.ready.wait()
        await servers[0].__aexit__()  # its agent has ended
        assert (await sleeper.end())[0] == -signal.SIGKILL
        assert await asyncio.to_thread(psutil.wait_procs, [first], 20) == ([first], [])
        assert (await (await start(servers[1], DO="nothing")).end())[0] == 0


async def test_children_can_name_themselves_in_the_list_of_processes(environment: pytest.MonkeyPatch) -> None:
    """Their command line is found by the environment, which is another one by then."""
    async with asyncio.timeout(30), Zygote(ENTRY) as zygote:
        environment.setenv(ADOPTED, str(zygote.channel().detach()))
        async with ForkServer(ENTRY) as server:
            assert await (await start(server, DO="name", WHO="zmqtrain worker/3")).end() == (0, "zmqtrain worker/3\n", b"")


async def test_servers_and_children_end_with_their_agent(environment: pytest.MonkeyPatch) -> None:
    """The loss of the process that they were forked from does not matter to them."""
    async with asyncio.timeout(30), Zygote(ENTRY) as zygote:
        environment.setenv(ADOPTED, str(zygote.channel().detach()))
        async with ForkServer(ENTRY) as server:
            sleeper = await start(server, DO="sleep")
            await sleeper.ready.wait()
            os.kill(zygote.pid, signal.SIGKILL)
            assert (await (await start(server, DO="print", WHO="it")).end())[0] == 0
        assert (await sleeper.end())[0] == -signal.SIGKILL  # its output has ended, so it is gone
        with pytest.raises(HostLostError, match="has died"):
            zygote.channel()


async def test_a_launcher_takes_one_that_is_running_already(environment: pytest.MonkeyPatch) -> None:
    serves = (
        "import socket, sys; from zmqtrain.launcher.zygote import import_entry, serve_launcher; "
        "serve_launcher(socket.socket(fileno=int(sys.argv[1])), import_entry(sys.argv[2]))"
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = str(theirs.fileno())
        running = await asyncio.create_subprocess_exec(sys.executable, "-c", serves, number, ENTRY, pass_fds=(theirs.fileno(),))
    environment.setenv("WHO", "it")
    environment.setenv(RUNNING, str(ours.detach()))
    for _ in range(2):  # launches of one process
        async with asyncio.timeout(30), Zygote(ENTRY) as zygote:
            assert RUNNING not in os.environ  # it serves no other process
            environment.setenv(ADOPTED, str(zygote.channel().detach()))
            async with ForkServer(ENTRY) as server:
                process = psutil.Process(await server.pid())
                assert process.ppid() == running.pid
                assert (await (await start(server, DO="print")).end())[0] == 0
        assert not process.is_running()
    channel_at(os.environ.pop(RUNNING)).close()
    assert await running.wait() == 0
