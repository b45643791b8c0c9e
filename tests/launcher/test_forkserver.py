"""A server that forks: what its children get, how their ends are told, and that none outlives it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S
from zmqtrain.errors import HostLostError, UsageError
from zmqtrain.launcher.child import SCRIPT, SEED
from zmqtrain.launcher.entries import SESSION_ENTRY
from zmqtrain.launcher.forkserver import Child, ForkServer
from zmqtrain.launcher.output import OutputReader
from zmqtrain.membership.environment import RoleEnvironment


class Started:
    """A child with the other ends of its files."""

    def __init__(self, child: Child, report: int, output: OutputReader, text: list[str]) -> None:
        self.child, self.report, self.output, self.text = child, report, output, text
        self.ready = asyncio.Event()

    async def end(self) -> tuple[int, str, bytes]:
        """Exit code, output and report."""
        code = await self.child.exited
        await self.output.ended.wait()
        report = os.read(self.report, 4096)
        os.close(self.report)
        return code, "".join(self.text), report


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "roles"), prepend=os.pathsep)
    return "forked_entries:main"


async def start(server: ForkServer, **environ: str) -> Started:
    report_read, report_write = os.pipe()
    output_read, output_write = os.pipe()
    text: list[str] = []
    said = asyncio.Event()

    def take(lines: str) -> None:
        text.append(lines)
        said.set()

    output = OutputReader(output_read, take)
    try:
        child = await server.start(environ, output_write, report_write)
    finally:
        os.close(output_write)
        os.close(report_write)
    started = Started(child, report_read, output, text)
    started.ready = said
    return started


async def test_children_and_how_they_end(entry: str) -> None:
    async with asyncio.timeout(30), ForkServer(entry) as server:
        server_process = psutil.Process(await server.pid())
        assert (await (await start(server, DO="nothing")).end())[0] == 0
        files = server_process.num_fds()
        todo = ("print", "report", "exit", "raise", "die", "close", "nothing")
        started = await asyncio.gather(*(start(server, DO=one, WHO=f"child {one}") for one in todo))
        ends = dict(zip(todo, await asyncio.gather(*(one.end() for one in started)), strict=True))
        assert ends["print"] == (0, "to standard output\nto standard error of child print\n", b"")
        assert ends["report"] == (3, "", b'{"message": "wrong"}')
        assert ends["exit"][0] == 7
        assert ends["raise"][0] != 0
        assert "RuntimeError: nobody has caught this" in ends["raise"][1]
        assert ends["die"][0] == -signal.SIGKILL
        assert ends["close"] == ends["nothing"] == (0, "", b"")
        assert os.environ.get("WHO") is None
        # Nothing is left of them: neither files nor processes.
        assert server_process.num_fds() == files
        assert not server_process.children()
    assert not psutil.pid_exists(server_process.pid)


async def test_children_have_what_their_server_has_imported(entry: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os\nsaid = os.environ.get('GIVEN')\nos.environ['LEFT'] = 'by the module'\n")
    async with asyncio.timeout(30), ForkServer(entry) as server:
        await server.preload(["slow", "json.tool"], [str(tmp_path)], {"GIVEN": "for a while"}, 1)
        code, text, _ = await (await start(server, DO="modules", WHO="slow json.tool")).end()
        assert (code, text) == (0, "slow True for a while\njson.tool True None\nGIVEN None LEFT by the module path False\n")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import nowhere", "bad cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("import sys; sys.exit(3)", "bad cannot be imported: SystemExit: 3"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "bad starts threads"),
    ],
)
async def test_what_children_cannot_share_is_refused(entry: str, tmp_path: Path, code: str, why: str) -> None:
    (tmp_path / "bad.py").write_text(code)
    async with asyncio.timeout(30), ForkServer(entry) as server:
        with pytest.raises(UsageError, match=why):
            await server.preload(["bad"], [str(tmp_path)], {}, 1)
        assert psutil.pid_exists(await server.pid())


async def test_a_server_that_dies_while_it_imports(entry: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    async with asyncio.timeout(30), ForkServer(entry) as server:
        with pytest.raises(HostLostError, match="forkserver"):
            await server.preload(["bad"], [str(tmp_path)], {}, 1)


async def test_a_role_is_named_in_the_list_of_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import psutil\nprint(psutil.Process().cmdline()[0])\n")
    role = RoleEnvironment("worker/3", "tcp://127.0.0.1:1", "token").to_environ()
    async with asyncio.timeout(PATIENCE_S), ForkServer(SESSION_ENTRY) as server:
        started = await start(server, **role, **{SCRIPT: json.dumps([str(script)]), SEED: "1"})
        assert await started.end() == (0, "zmqtrain worker/3\n", b"")


async def test_children_end_with_their_server(entry: str) -> None:
    async with asyncio.timeout(30):
        async with ForkServer(entry) as server:
            sleepers = await asyncio.gather(*(start(server, DO="sleep") for _ in range(3)))
            for one in sleepers:
                await one.ready.wait()
            sleepers[0].child.signal(signal.SIGTERM)
            assert (await sleepers[0].end())[0] == -signal.SIGTERM
            os.kill(await server.pid(), signal.SIGKILL)
            for one in sleepers[1:]:
                assert (await one.end())[0] == -signal.SIGKILL  # its output has ended, so it is gone
            with pytest.raises(HostLostError, match="forkserver"):
                await start(server, DO="nothing")
        async with ForkServer(entry) as server:
            sleeper = await start(server, DO="sleep")
            await sleeper.ready.wait()
        assert (await sleeper.end())[0] == -signal.SIGKILL


async def test_what_children_have_started_ends_with_them(entry: str) -> None:
    """At the latest with the server, if it has left their process group."""
    async with asyncio.timeout(PATIENCE_S):
        async with ForkServer(entry) as server:
            started = await start(server, DO="start others")
            code, text, _ = await started.end()
            assert code == 0
            near, moved = map(int, text.split())
            await _gone(near)
            assert _is_running(moved)
        assert not _is_running(moved)


async def _gone(pid: int) -> None:
    """Wait until a process that was killed has ended. It is no child of this one, so nothing tells."""
    while _is_running(pid):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_an_entry_that_cannot_be_imported_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "roles"), prepend=os.pathsep)
    async with asyncio.timeout(30), ForkServer("forked_entries_that_are_not_there:main") as server:
        with pytest.raises(HostLostError):
            await start(server, DO="nothing")


async def test_it_leaves_without_a_word(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Frozen objects cannot be freed, so what extension modules do at an exit would report them as leaks."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "roles"), prepend=os.pathsep)
    async with asyncio.timeout(PATIENCE_S), ForkServer("says_bye:main") as server:
        await server.pid()
    assert capfd.readouterr() == ("", "")
