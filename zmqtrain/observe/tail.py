"""What has been added to files since the last look at them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class Tail:
    """Remembers how much of each file has been seen."""

    def __init__(self, seen: Iterable[Path] = ()) -> None:
        """``seen``: files of which only what is added from now on is new."""
        self._seen: dict[Path, int] = {file: file.stat().st_size for file in seen}

    def new_lines(self, file: Path, *, whole: bool = False) -> list[str]:
        """The lines that have been completed since the last call. ``whole``: also the last line, complete or not."""
        start = self._seen.get(file, 0)
        with file.open("rb") as stream:
            stream.seek(start)
            data = stream.read()
        if not whole:
            data = data[: data.rfind(b"\n") + 1]
        self._seen[file] = start + len(data)
        return data.decode(errors="replace").splitlines()
