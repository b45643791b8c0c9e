"""The tutorials and guides run as they stand: files are written, commands run, and what is shown is what comes, but for figures.

A code block whose first line is ``# NAME`` is the file NAME. In a ``console`` block each line after ``$`` is a command; the others
are lines of its output, perhaps not all of them. Blocks of other languages are only shown.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted(page for page in (ROOT / "docs" / "tutorials").glob("*.md") if page.name != "index.md")
#: Programs that tutorials may run, as this interpreter finds them.
PROGRAMS = {
    "zmqtrain": [sys.executable, "-m", "zmqtrain"],
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def files(text: str) -> dict[str, str]:
    """The files of a page, by name."""
    blocks = [block for language, block in BLOCK.findall(text) if language in ("python", "toml")]
    return {block.splitlines()[0].removeprefix("# "): block for block in blocks}


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a page, each with the lines that it is shown to print."""
    for language, block in BLOCK.findall(text):
        if language == "console":
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, *shown = part.splitlines()
                yield command, [line for line in shown if line.strip()]


def words(line: str) -> list[str]:
    """A line without its figures and their units, which differ from run to run."""
    return re.sub(r"[\d.,%]+(\s*(ms|us|s)\b)?|[^\w\s]", " ", line).split()


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    for name, content in files(text).items():
        (tmp_path / name).write_text(content)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    ran = 0
    for command, shown in commands(text):
        program, *arguments = shlex.split(command)
        done = subprocess.run(
            [*PROGRAMS[program], *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        printed = [" ".join(words(line)) for line in done.stdout.splitlines()]
        for line in shown:
            assert any(" ".join(words(line)) in each for each in printed), f"{command} does not print {line!r} but\n{done.stdout}"
        ran += 1
    assert ran


GUIDE = (ROOT / "docs" / "how-to" / "testing.md").read_text()


@pytest.mark.parametrize("name", files(GUIDE))
def test_the_guide_to_testing(name: str) -> None:
    functions: dict[str, object] = {"__name__": name}
    exec(compile(files(GUIDE)[name], name, "exec"), functions)
    tests = [value for key, value in functions.items() if key.startswith("test_")]
    assert tests
    for test in tests:
        assert callable(test)
        test()


def test_other_guides_have_files_without_fault() -> None:
    from zmqtrain.topology.load import parse_topology

    for page in (ROOT / "docs" / "how-to").glob("*.md"):
        for language, block in BLOCK.findall(page.read_text()):
            if language == "toml":
                parse_topology(block)
