"""Lines from one process to another, by way of a folder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from zmqtrain.run.side_lines import LineReader, LineWriter, begins_at, orders_for


async def test_lines_arrive_whole_from_several_writers(tmp_path: Path) -> None:
    path = tmp_path / "line"
    os.mkfifo(path)
    came: list[str] = []
    with LineReader(path, came.append), LineWriter(path) as one, LineWriter(path) as other:
        for number in range(100):
            assert one.say(f"one {number}")
            assert other.say(f"other {number}")
        while len(came) < 200:  # noqa: ASYNC110 - the loop reads meanwhile
            await asyncio.sleep(0)
    assert came == [f"{who} {number}" for number in range(100) for who in ("one", "other")]


async def test_nobody_waits_for_a_reader(tmp_path: Path) -> None:
    """Neither if there is none yet, nor if it is gone or stands still; and the next one reads what comes then."""
    path = tmp_path / "line"
    os.mkfifo(path)
    came: list[str] = []
    with LineWriter(path) as line:
        assert not line.say("too early")
        with LineReader(path, came.append):
            assert line.say("heard")
            while not came:  # noqa: ASYNC110 - the loop reads meanwhile
                await asyncio.sleep(0)
            written = 0
            while line.say("x" * 1000):
                written += 1
            assert written
        assert not line.say("too late")
        with LineReader(path, came.append):
            assert line.say("again")
            while came[-1] != "again":  # noqa: ASYNC110
                await asyncio.sleep(0)
    with LineWriter(tmp_path / "nothing") as line:
        assert not line.say("nowhere")


def test_each_process_has_its_own(tmp_path: Path) -> None:
    shaping = tmp_path / "shaping.json"
    paths = [begins_at(shaping, "worker/1"), begins_at(shaping, "worker/11"), orders_for(shaping, "worker-1")]
    assert len(set(paths)) == 3
    assert {path.parent for path in paths} == {tmp_path}
