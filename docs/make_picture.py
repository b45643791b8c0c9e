"""Writes docs/run.svg, the picture of a run in the README: ``python docs/make_picture.py`` in a checkout (half a minute).

It is what ``zmqtrain launch launch/digits.toml`` prints, drawn by rich. Figures differ from run to run, so no test compares it.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "run.svg"
COMMAND = ["zmqtrain", "launch", "launch/digits.toml"]
#: Evaluations and progress lines in the picture, of many.
MOST = 4
WIDTH = 136
#: Without the fonts that rich's format fetches from another server.
FORMAT = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def output() -> list[str]:
    """What the run prints, without the path of its temporary directory."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *COMMAND, "--run-dir", f"{folder}/digits-001"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
        return done.stdout.replace(folder, "runs").splitlines()


def chosen(lines: list[str]) -> list[str]:
    """All lines but the most of those that repeat."""
    kept: list[str] = []
    for start in ("step ", "evaluation at "):
        repeated = [line for line in lines if line.startswith(start) and " (median)" not in line]
        kept += [line for place, line in enumerate(repeated) if place % max(1, len(repeated) // MOST) == 0 or line is repeated[-1]]
    progress = re.compile(r"step \d+(\.\.\d+)?  |evaluation at ")
    return [line for line in lines if line in kept or not progress.match(line)]


def picture(lines: list[str]) -> str:
    """The lines in a drawn terminal."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(f"[bold green]$[/] [bold]{' '.join(COMMAND)}[/]")
    for line in lines:
        console.print(line, markup=False, style="bold" if line.startswith("done in") else None)
    return console.export_svg(title="", theme=MONOKAI, code_format=FORMAT, unique_id="run")


if __name__ == "__main__":
    PICTURE.write_text(picture(chosen(output())))
