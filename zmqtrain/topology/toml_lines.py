"""Find the line of a key or table in the text of a TOML file, for error messages.

``tomllib`` gives values without places. The text has been accepted by it (or is at least nearly TOML), so a simple scanner that
knows headers, keys, strings and brackets is enough. It skips anything else, and a fault then names the nearest line that it found.
"""

from __future__ import annotations

from collections.abc import Mapping

Path = tuple[str | int, ...]


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line = 1

    def move(self, count: int = 1) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def skip_blank(self, *, newlines: bool) -> None:
        """Skip spaces and comments, and line ends if ``newlines``."""
        while self.at < len(self.text):
            if self.peek() in (" ", "\t", "\r") or (newlines and self.peek() == "\n"):
                self.move()
            elif self.peek() == "#":
                self.skip_line()
            else:
                return

    def skip_line(self) -> None:
        """Skip to the end of the line, but not past it."""
        end = self.text.find("\n", self.at)
        self.move((len(self.text) if end < 0 else end) - self.at)

    def string(self) -> str:
        """Skip a string of any of TOML's four kinds and return its raw content."""
        quote = self.peek()
        mark = quote * 3 if self.text.startswith(quote * 3, self.at) else quote
        self.move(len(mark))
        start = self.at
        while self.at < len(self.text) and not self.text.startswith(mark, self.at):
            if len(mark) == 1 and self.peek() == "\n":
                break
            self.move(2 if self.peek() == "\\" and quote == '"' else 1)
        content = self.text[start : self.at]
        self.move(len(mark))
        while len(mark) == 3 and self.peek() == quote:  # up to two quotes may stand before the closing three
            self.move()
        return content

    def key(self) -> list[str]:
        """Read a dotted key and return its parts."""
        parts: list[str] = []
        while True:
            self.skip_blank(newlines=False)
            if self.peek() in ('"', "'"):
                parts.append(self.string())
            else:
                start = self.at
                while self.at < len(self.text) and (self.peek().isalnum() or self.peek() in "_-"):
                    self.move()
                parts.append(self.text[start : self.at])
            self.skip_blank(newlines=False)
            if self.peek() != ".":
                return parts
            self.move()


def find_lines(text: str) -> dict[Path, int]:
    """The line (from 1) on which each key and each table begins: ``("hosts", 1, "slots")`` is the second host's slots."""
    scanner, lines = _Scanner(text.replace("\r\n", "\n")), dict[Path, int]()
    counts: dict[Path, int] = {}
    table: Path = ()
    while True:
        scanner.skip_blank(newlines=True)
        if scanner.at >= len(scanner.text):
            return lines
        line, before = scanner.line, scanner.at
        if scanner.peek() == "[":
            array = scanner.text.startswith("[[", scanner.at)
            scanner.move(2 if array else 1)
            table = _inside(scanner.key(), counts)
            if array:
                counts[table] = counts.get(table, -1) + 1
                lines.setdefault(table, line)
                table = (*table, counts[table])
            lines.setdefault(table, line)
            scanner.skip_line()
        else:
            _pair(scanner, table, lines)
            scanner.skip_line()
        if scanner.at == before:  # unknown: always move on
            scanner.move()


def _inside(parts: list[str], counts: Mapping[Path, int]) -> Path:
    """A header's path: inside an array of tables it refers to the last table of the array."""
    path: Path = ()
    for number, part in enumerate(parts):
        path = (*path, part)
        if path in counts and number < len(parts) - 1:
            path = (*path, counts[path])
    return path


def _pair(scanner: _Scanner, table: Path, lines: dict[Path, int]) -> None:
    line = scanner.line
    path = table
    for part in scanner.key():
        path = (*path, part)
        lines.setdefault(path, line)
    scanner.skip_blank(newlines=False)
    if scanner.peek() == "=":
        scanner.move()
        _value(scanner, path, lines)


def _value(scanner: _Scanner, path: Path, lines: dict[Path, int]) -> None:
    scanner.skip_blank(newlines=False)
    if scanner.peek() in ('"', "'"):
        scanner.string()
    elif scanner.peek() == "[":
        _sequence(scanner, path, lines, "]")
    elif scanner.peek() == "{":
        _sequence(scanner, path, lines, "}")
    else:
        while scanner.at < len(scanner.text) and scanner.peek() not in ",]}\n#":
            scanner.move()


def _sequence(scanner: _Scanner, path: Path, lines: dict[Path, int], close: str) -> None:
    """Read an array or an inline table, and note the lines of what is in it."""
    scanner.move()
    number = 0
    while True:
        scanner.skip_blank(newlines=True)
        if scanner.at >= len(scanner.text):
            return
        if scanner.peek() == close:
            scanner.move()
            return
        before = scanner.at
        if close == "]":
            lines.setdefault((*path, number), scanner.line)
            _value(scanner, (*path, number), lines)
            number += 1
        else:
            _pair(scanner, path, lines)
        scanner.skip_blank(newlines=True)
        if scanner.peek() == "," or scanner.at == before:
            scanner.move()


def line_of(lines: Mapping[Path, int], path: Path) -> int | None:
    """The line of ``path``, or else of the innermost table around it that has one."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return None
