"""`zmqtrain top` on a terminal: every panel shows what the run's directory has, and keys do what the page's buttons do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Select

from tests.observe.dashboard.runs import add_events, make_run
from tests.observe.dashboard.test_search import add, begins, ends, line, make_search
from tests.observe.dashboard.test_server import Control
from zmqtrain.observe.dashboard.app import Top
from zmqtrain.observe.run_directory import RunDirectory


class Running(Control):
    """All runs go on."""

    def state(self, path: Path) -> dict[str, Any]:
        return {"status": "running"}


@asynccontextmanager
async def opened(
    folder: Path, run: str = "digits-001", *, control: Control | None = None, size: tuple[int, int] = (80, 40)
) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    """The application, which looks at its run when it is told to."""
    app = Top(folder, run, control or Running(), look_s=0)
    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        yield app, pilot


async def settled(app: Top, pilot: Pilot[None]) -> None:
    await app.workers.wait_for_complete()
    await pilot.pause()


async def pressed(app: Top, pilot: Pilot[None], *keys: str) -> str:
    """What is on the screen after these keys."""
    for key in keys:
        await pilot.press(key)
        await settled(app, pilot)
    await pilot.pause()
    return text(app)


def text(app: Top) -> str:
    assert app.screen.size.width == app.size.width
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in app.screen._compositor.render_strips())


@pytest.mark.parametrize("size", [(80, 24), (80, 60), (170, 40)])
async def test_a_worker_is_lost_and_every_panel_says_what_is_so(tmp_path: Path, size: tuple[int, int]) -> None:
    path = make_run(tmp_path, ended=False)
    add_events(path, ("lost", 1, None, {"reason": "no heartbeat for 8 s"}))
    async with opened(tmp_path, size=size) as (app, pilot):
        run = text(app)
        for part in ("digits-001  running", "loss 0.2", "eval accuracy 0.75", "exposed communication 20 %"):
            assert part in run
        assert "worker/1 lost: no heartbeat for 8 s" in run
        assert "500 ms" in run
        curves = await pressed(app, pilot, "2")
        assert "Loss  group 0 0.2  group 1 0.2  mean 0.2" in curves
        workers = await pressed(app, pilot, "3")
        assert [row.split()[0] for row in workers.splitlines() if row.startswith("worker/")] == ["worker/0", "worker/1"]
        hosts = await pressed(app, pilot, "4")
        assert "a  0  1✗" in hosts
        traffic = await pressed(app, pilot, "5")
        for part in ("server/0", "0.5 (at most 3)", "25 %", "as workers counted them: 1.00"):
            assert part in traffic
        if size[1] > 24:
            assert "worker/0  worker/1   2 KB" in traffic
        events = await pressed(app, pilot, "7")
        assert "<b>kept</b> & done" in events or size[1] == 24
        assert "no heartbeat for 8 s" in events


async def test_what_happens_appears_and_another_size_shows_as_much(tmp_path: Path) -> None:
    path = make_run(tmp_path, ended=False)
    async with opened(tmp_path, size=(80, 24)) as (app, pilot):
        add_events(path, ("step", 0, 6, {"loss": 0.125, "seconds": 0.5, "compute_s": 0.1, "exposed_s": 0.1, "samples": 4}))
        app.look()
        await settled(app, pilot)
        assert "0.125" in text(app)
        assert "samples/s  step time" not in text(app)
        await pilot.resize_terminal(130, 30)
        await settled(app, pilot)
        assert "samples/s  step time" in text(app)
        assert max(map(len, text(app).splitlines())) <= 130


async def test_two_runs_beside_each_other(tmp_path: Path) -> None:
    make_run(tmp_path)
    make_run(tmp_path, "digits-002", steps=3)
    async with opened(tmp_path, size=(170, 40)) as (app, pilot):
        listed = await pressed(app, pilot, "r")
        assert "digits-002" in listed
        table = app.query_one(DataTable)
        assert app.focused is table
        assert "is shown already" in await pressed(app, pilot, "b")
        table.move_cursor(row=1 - table.cursor_row)
        both = await pressed(app, pilot, "b")
        first = next(row for row in both.splitlines() if "digits-002" in row)
        assert first.index("digits-001") < first.index("digits-002")
        assert "mean 0.2  mean, digits-002 0.3333" in await pressed(app, pilot, "2")
        await pilot.resize_terminal(80, 40)
        below = await pressed(app, pilot, "1")
        assert [row.split()[0] for row in below.splitlines() if row.startswith("digits-")] == [
            "digits-001",
            "digits-001",
            "digits-002",
        ]
        await pressed(app, pilot, "r", "enter")
        assert text(app).startswith("digits-002")


async def test_curves_are_over_steps_or_time(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with opened(tmp_path) as (app, pilot):
        assert "step 0" in await pressed(app, pilot, "2")
        assert "after 1.0 s" in await pressed(app, pilot, "x")


async def test_a_search(tmp_path: Path) -> None:
    path = make_search(tmp_path, begins(1), ends(1), line("grid"), begins(2))
    async with opened(tmp_path, "spirals-001", size=(120, 30)) as (app, pilot):
        shown = await pressed(app, pilot, "6")
        assert "now trial 2 (race): 2 groups, momentum 0.6, learning rate 0.1, 12 updates; 1 trial so far" in shown
        assert "why grid" in shown
        assert "2 to 1.5" in shown
        add(path, ends(2))
        app.look()
        await settled(app, pilot)
        assert "2 trials so far" in text(app)


async def test_events_and_logs_are_filtered(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with opened(tmp_path) as (app, pilot):
        assert "worker/0 joined" in await pressed(app, pilot, "7")
        app.query_one("#kind", Select).value = "slow"
        await settled(app, pilot)
        assert "worker/0 joined" not in text(app)
        assert "worker/1 is slow" in text(app)
        app.query_one("#source", Select).value = "worker/0"
        await settled(app, pilot)
        assert "from worker 0" in text(app)
        assert "hello" in text(app)
        await pressed(app, pilot, "slash", *"from")
        assert app.query_one("#text", Input).value == "from", "letters are no commands while somebody writes"
        assert "hello" not in text(app)
        assert "from worker 0" in text(app)


async def test_the_end_of_a_log_is_seen(tmp_path: Path) -> None:
    path = make_run(tmp_path, ended=False)
    (path / "logs" / "worker-1.log").write_text("".join(f"line {number}\n" for number in range(100)))
    async with opened(tmp_path, size=(80, 24)) as (app, pilot):
        await pressed(app, pilot, "7")
        app.query_one("#source", Select).value = "worker/1"
        await settled(app, pilot)
        assert "line 99" in await pressed(app, pilot)
        with (path / "logs" / "worker-1.log").open("a") as log:
            log.write("and more\n")
        app.look()
        await settled(app, pilot)
        assert "and more" in await pressed(app, pilot)


async def test_of_many_workers_those_with_trouble_come_first(tmp_path: Path) -> None:
    path = make_run(tmp_path, ended=False)
    step = {"loss": 1.0, "seconds": 0.5, "compute_s": 0.1, "exposed_s": 0.1, "samples": 4}
    add_events(path, *(("step", rank, 5, step) for rank in range(100)), ("lost", 77, None, {"reason": "gone"}))
    async with opened(tmp_path, size=(80, 60)) as (app, pilot):
        workers = await pressed(app, pilot, "3")
        assert "worker/77" in workers
        assert "60 more" in workers
        await pressed(app, pilot, "slash", *"group 55")
        assert [row.split()[0] for row in text(app).splitlines() if row.startswith("worker/")] == ["worker/55"]


async def test_keys_ask_before_they_act(tmp_path: Path) -> None:
    path = make_run(tmp_path, ended=False)
    (path / "topology.toml").write_text(
        '[job]\nname = "digits"\n[compute]\ngroups = 2\n[[hosts]]\nname = "a"\n[[hosts]]\nname = "b"\n'
    )
    control = Running()
    async with opened(tmp_path, control=control) as (app, pilot):
        assert "a script keeps its own" in await pressed(app, pilot, "c"), "what is refused is said"
        assert "Stop digits-001?" in await pressed(app, pilot, "s")
        await pressed(app, pilot, "escape")
        await pressed(app, pilot, "s", "enter")
        assert not control.asked, "the first answer is to do nothing"
        assert "it stops" in await pressed(app, pilot, "s", "down", "enter")
        assert control.asked == ["stop digits-001"]
        assert "Drain b?" in await pressed(app, pilot, "d", "down", "down", "enter")
        assert "it has left" in await pressed(app, pilot, "down", "enter")
        assert control.asked[1:] == ["drain b of digits-001"]


async def test_a_host_that_is_the_only_one_stays(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with opened(tmp_path) as (app, pilot):
        assert "has no host that it could do without" in await pressed(app, pilot, "d")
        await pilot.press("q")
    assert not app.is_running


async def test_what_a_run_says_is_neither_markup_nor_a_command_to_the_terminal(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    add_events(path, ("note", 0, None, {"text": "[red]no[/red]\x1b[2J\nmore"}))
    directory = RunDirectory.go_on(path)
    directory.log("worker/0", "[b]printed[/b] \x1b[31m\n")
    directory.close()
    async with opened(tmp_path, size=(130, 40)) as (app, pilot):
        assert "[red]no[/red] [2J more" in await pressed(app, pilot, "7")
        app.query_one("#source", Select).value = "worker/0"
        await settled(app, pilot)
        assert "[b]printed[/b]  [31m" in text(app)
