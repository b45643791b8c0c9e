"""The tutorials and guides run as they stand: files are written, commands run, and what is shown is what comes, but for figures.

A code block whose first line is ``# NAME`` is the file NAME. In a ``console`` block each line after ``$`` is a command; the others
are lines of its output, perhaps not all of them. Blocks of other languages are only shown.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.launcher.ready import PYTHON, ready_process, warm
from tests.patience import PATIENCE_S
from zmqtrain.launcher.zygote import RUNNING

ROOT = Path(__file__).parents[1]
#: Without the notebook's, whose cells tests/examples/test_notebook.py runs.
TUTORIALS = sorted(page for page in (ROOT / "docs" / "tutorials").glob("*.md") if page.name not in ("index.md", "notebook.md"))
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


def started(program: str, arguments: list[str], folder: Path) -> tuple[int, str]:
    """The exit code and the output of a program in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [*PROGRAMS[program], *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout


def run(program: str, arguments: list[str], folder: Path) -> tuple[int, str]:
    """As `started`, but forked by a process that has imported torch for all of them, where that shows the same."""
    environment = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    # That torchrun itself starts programs with this backend is shown by tests/integrations/test_frameworks.py, with Accelerate's
    # launcher.
    if not ready_process().serves(environment):
        return started(program, arguments, folder)
    with open(folder / "output", "wb") as output, ExitStack() as stack:
        if "auto.toml" in arguments:  # it makes several runs, each with a zygote of its own
            environment |= stack.enter_context(warm()).variables
        if program == "torchrun":
            option, count, *words = arguments
            assert option == "--nproc-per-node"
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            said = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            environment |= {**said, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test"}
            several = [
                ((PYTHON, *words), {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(int(count))
            ]
        else:
            several = [((*((PYTHON,) if program == "python" else ()), *arguments), environment)]
        if arguments[0] == "launch" and RUNNING not in environment:
            _, channel = ready_process().zygote(folder, environment, output.fileno())
        else:
            channel, other = socket.socketpair()
            stack.enter_context(other)
        with channel:
            processes = [
                ready_process().command(command, folder, own, output.fileno(), output.fileno(), channel.fileno())
                for command, own in several
            ]
        try:
            code = max(abs(process.wait(PATIENCE_S)) for process in processes)
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
    return code, (folder / "output").read_text()


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    for name, content in files(text).items():
        (tmp_path / name).write_text(content)
    ran = 0
    for command, shown in commands(text):
        program, *arguments = shlex.split(command)
        code, output = run(program, arguments, tmp_path)
        assert code == 0, f"{command}\n{output}"
        printed = [" ".join(words(line)) for line in output.splitlines()]
        for line in shown:
            assert any(" ".join(words(line)) in each for each in printed), f"{command} does not print {line!r} but\n{output}"
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
