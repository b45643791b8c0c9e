"""What roles print comes out in whole lines, whatever pieces it came in."""

from __future__ import annotations

import asyncio
import os

from zmqtrain.launcher.output import LONGEST_LINE, OutputReader


async def read(*pieces: bytes) -> list[str]:
    """What a reader hands on of these pieces, each written when the one before has been read."""
    reading, writing = os.pipe()
    taken: list[str] = []
    reader = OutputReader(reading, taken.append)
    for piece in pieces:
        os.write(writing, piece)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    os.close(writing)
    async with asyncio.timeout(5):
        await reader.ended.wait()
    reader.close()
    return taken


async def test_whole_lines_only() -> None:
    assert "".join(await read(b"one\ntw", b"o\nthr", b"ee")) == "one\ntwo\nthree\n"
    assert all(text.endswith("\n") for text in await read(b"one\ntw", b"o\nthr", b"ee"))


async def test_a_line_without_an_end_does_not_grow_for_ever() -> None:
    taken = await read(*[b"." * 4000] * 5)
    assert sum(text.count(".") for text in taken) == 20_000
    assert max(map(len, taken)) <= 2 * LONGEST_LINE


async def test_bytes_that_are_no_text() -> None:
    assert await read(b"\xff\xfe\n") == ["��\n"]


async def test_nothing() -> None:
    assert await read() == []
