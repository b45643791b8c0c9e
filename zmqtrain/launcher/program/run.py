"""Runs that a program starts, follows and stops::

    with zmqtrain.launch("task.py:task", groups=4, epochs=3) as run:
        for line in run:                                    # the lines of events.jsonl, as they come
            if line["kind"] == "eval":
                print(line["step"], line["values"])
        model = run.model()                                 # trained

The launcher is a process of its own, so that its signals, its forks and its event loop are apart from the program's. What a program
learns of its run comes from the run's directory, as for every command.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from zmqtrain.errors import CheckpointError, RunFailedError, UsageError
from zmqtrain.launcher.signals import wanted_on_sigterm
from zmqtrain.membership.environment import PEER
from zmqtrain.notebook import Output, in_notebook
from zmqtrain.observe.card import html, picture
from zmqtrain.observe.dashboard.follow import Followed
from zmqtrain.observe.live import as_one
from zmqtrain.observe.run_directory import SCHEMA, next_folder
from zmqtrain.observe.sums import SUMS
from zmqtrain.observe.tail import Tail
from zmqtrain.parallel.turns import generators_kept
from zmqtrain.svg import Picture
from zmqtrain.topology.find_task import find_task
from zmqtrain.topology.target import ProgramJob, Target, job_of

if TYPE_CHECKING:
    from torch import nn

#: Set in every process below a launch: a task's module that launches when it is imported would never end doing so.
INSIDE = "ZMQTRAIN_PROGRAM"
#: Seconds between two looks at what a run has written.
LOOK_S = 0.2
#: Variables by which kernels of notebooks ask for a terminal's colours, which a pipe does not have.
_COLOURED = frozenset(("CLICOLOR_FORCE", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"))
#: Seconds between two pictures of a run in a notebook, and how long the last one is waited for.
SHOW_S, _LAST_PICTURE_S = 1.0, 10.0
#: How long the last lines of a launcher are waited for: who else has its pipe may keep it open.
_LAST_LINES_S = 5.0
#: Lines of the launcher that an error may quote.
_LINES = 20
#: Lines of the launcher that a notebook shows.
_SHOWN_LINES = 5


def launch(
    target: Target,
    *,
    set: Mapping[str, Any] | None = None,
    data: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    emulate: bool = False,
    watch: bool = False,
    **settings: Any,
) -> LaunchedRun:
    """Start a run, and return at once.

    The run is the one that ``zmqtrain launch`` would start in the current folder, in a process of its own. It ends with this
    program, with a checkpoint where it can, as by Ctrl-C; Ctrl-C itself reaches this program alone.

    Args:
        target: the path of a topology file; a `Topology`; a mapping with the structure of a file; a task, written
            ``"module:function"`` or ``"path/to/file.py:function"``; or the task's function. Workers import a function by its name,
            so it must stand in a module or in the program's own file, not in a cell of a notebook.
        set: other values that replace those of the target, by ``section.key``: ``set={"exchange.kind": "gossip"}``.
        data: where the task finds its data, as ``--data``.
        resume: the checkpoint to continue from, as ``--resume``: a folder, a run, or ``latest``.
        run_dir: the run directory, empty or not there; by default the next ``runs/NAME-NNN``.
        emulate: put all hosts on this machine, with a network like the target's ``[network]`` between them.
        watch: print the lines of the command: progress, evaluations, and what the roles print. In a notebook, show the run below
            the cell instead, while it trains: its progress, its newest lines and its curves.
        settings: keys of ``[job]`` and ``[compute]`` (``groups=4, epochs=3``), and whole sections (``hosts=[...]``,
            ``exchange={"kind": "gossip"}``), which replace those of the target.

    Returns:
        The run. What keeps it from starting on its hosts is raised by its methods.

    Raises:
        UsageError: the job cannot be launched: faults of the topology, a task that cannot be found or imported by workers, a
            setting that does not exist; or this program is itself a process of a run.
    """
    if os.environ.get(INSIDE) or os.environ.get(PEER):
        raise UsageError(
            "launch() was called in a process of a run, where the task is imported: put the call under "
            '`if __name__ == "__main__":`, or into another file than the task'
        )
    job = job_of(target, settings, set or {})
    _check(job)
    folder = _folder(job.topology.job.name, run_dir)
    data_path = None if data is None else os.fspath(data)
    request = {
        "topology": job.topology.to_open_dict(),
        "file": str(job.file),
        "folder": str(folder),
        "data": data_path,
        "resume": None if resume is None else os.fspath(resume),
        "emulate": emulate,
    }
    report, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            (sys.executable, "-P", "-m", "zmqtrain.cli.program"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**{name: value for name, value in os.environ.items() if name not in _COLOURED}, INSIDE: str(os.getpid())},
            pass_fds=(theirs,),
            start_new_session=True,  # Ctrl-C is the program's
        )
    except OSError:
        os.close(report)
        raise
    finally:
        os.close(theirs)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, and its end says why
        process.stdin.write(json.dumps({**request, "report": theirs}).encode() + b"\n")
        process.stdin.flush()
    run = LaunchedRun(job, folder, data_path, process)
    run._follow(report, watch=watch)
    return run


def _check(job: ProgramJob) -> None:
    """What `launch` cannot do, or what would fail in every worker."""
    topology = job.topology
    if topology.compute.auto_groups:
        raise UsageError('launch() cannot search for groups = "auto": give a number, or use the command zmqtrain launch')
    if topology.job.task is not None:
        find_task(topology.job.task, topology.job.folders())
    elif topology.compute.device != "modelled":
        raise UsageError(
            f'{job.file.name} names no task: give launch() task="module:function" (a script is for the command zmqtrain launch)'
        )


class LaunchedRun:
    """A run that this program has started. Made by `launch`.

    Iterating over it, also with ``async for``, gives the lines of its ``events.jsonl`` as dictionaries (docs/events.md), from the
    first on and as they come, until the run has ended; if it has failed, its error is raised then. Each iteration is one of its
    own. Where many events of a second are one line, it is given as the last of them, with the sums of its times and samples
    (``[observe] events_per_s = "all"`` keeps every event).

    ``await run`` is `wait` for coroutines: it returns the summary once the run has ended, while others go on.

    In a ``with`` block, a run that has not ended at the block's end is stopped, with a checkpoint where it can. If it has failed
    and nothing has told the program yet, the block raises its error.
    """

    def __init__(self, job: ProgramJob, folder: Path, data: str | None, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        """The run directory."""
        self.topology = job.topology
        """The job as it was requested; ``topology.toml`` in the folder has it as it was resolved."""
        self._function, self._data, self._process = job.function, data, process
        self._here = Path.cwd()
        self._ended: Future[int] = Future()  # the exit code
        self._report: dict[str, Any] = {}
        self._said: deque[str] = deque(maxlen=_LINES)
        self._stopped = self._told = False
        self._followed = Followed(folder)
        self._display: Thread | None = None  # shows the run in a notebook

    def __repr__(self) -> str:
        state = f"ended with exit code {self._ended.result()}" if self._ended.done() else "running"
        return f"<run {self.folder}: {state}>"

    @property
    def running(self) -> bool:
        """Whether the run has not ended yet."""
        return not self._ended.done()

    @property
    def summary(self) -> dict[str, Any] | None:
        """``summary.json`` of the run: its status, steps, metrics and times. None until it has ended, and if it has not begun."""
        try:
            summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return summary

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until the run has ended.

        Args:
            timeout: the most seconds to wait; the run continues if it has not ended by then.

        Returns:
            The summary of the run, which is done, or was stopped by `stop` (``summary["status"]`` says which).

        Raises:
            RunFailedError: it has failed, has not begun, or was ended from outside. ``verdict`` and ``exit_code`` say why.
            TimeoutError: it has not ended.
        """
        try:
            code = self._end(timeout)
        except TimeoutError:
            raise TimeoutError(f"the run {self.folder} has not ended within {timeout:g} s, and goes on") from None
        summary = self.summary
        if summary is not None and (code == 0 or (self._stopped and summary["status"] == "interrupted")):
            return summary
        self._told = True
        raise RunFailedError(self._failure(code), self.folder)

    def stop(self, checkpoint: bool = True, timeout: float | None = None) -> None:
        """Stop the run, and wait until it has ended. It may have ended by itself; `wait` then says how.

        Args:
            checkpoint: all workers go on to a common step, and keep a checkpoint of it where they can, as with Ctrl-C;
                ``summary["checkpoints"]`` says whether. With False the run ends at once, and keeps what it had.
            timeout: the most seconds to wait.

        Raises:
            TimeoutError: it has not ended.
        """
        if self.running:
            self._stopped = True
            self._process.send_signal(signal.SIGINT)
            if not checkpoint:
                # Another signal with the same meaning: two of one kind may arrive as one.
                same = wanted_on_sigterm(self.topology.engine.kind)
                if same:
                    wait([self._ended], LOOK_S)
                self._process.send_signal(signal.SIGINT if same else signal.SIGTERM)
        try:
            self._end(timeout)
        except TimeoutError:
            raise TimeoutError(f"the run {self.folder} was told to stop, and has not ended within {timeout:g} s") from None

    def plot(self) -> Picture:
        """Curves of the loss, the metrics and the parts of a step, and a bar for each worker, as far as the run has come."""
        return picture(self._state())

    def model(self) -> nn.Module:
        """The model that the run has left (docs/model.md), on the CPU: the task's model with its parameters and buffers. While the
        run trains, that of its newest checkpoint.

        The task is imported into this program, and its function and ``Task.model()`` are called.

        Raises:
            CheckpointError: the run has left no model, or one that is not the task's.
            TaskError, UsageError: the task cannot be loaded here.
        """
        import torch
        from safetensors.torch import load_file

        from zmqtrain.train.checkpoint.model_file import NAME
        from zmqtrain.train.data_path import data_path_of
        from zmqtrain.train.task import build_model, task_of, task_of_job

        file, job = self.folder / NAME, self.topology.job
        if not file.is_file():
            when = "yet: the first checkpoint brings one" if self.running else "(docs/model.md says which runs leave one)"
            raise CheckpointError(f"the run {self.folder} has left no model {when}")
        if job.task is None:
            raise UsageError(f"the run {self.folder} has no task that could make its model")
        data = data_path_of(self._data, self.topology)
        with generators_kept():  # the program's own random numbers go on as if nothing had been made
            torch.manual_seed(job.seed)
            if self._function is not None:
                task = task_of(self._function, job.task, job.args, data)
            else:
                task = task_of_job(job, data, here=self._here)
            model = build_model(task)
        try:
            model.load_state_dict(load_file(file))
        except RuntimeError as error:
            raise CheckpointError(f"{file} is not of the model that the task {job.task} makes here: {error}") from error
        return model

    def _repr_html_(self) -> str:
        return html(self._state(), said="\n".join(list(self._said)[-_SHOWN_LINES:]))

    def _state(self) -> dict[str, Any]:
        """The run as the dashboard shows it."""
        status = "running" if self.running else str((self.summary or {"status": "failed"})["status"])
        while self._followed.look():
            pass
        return {**self._followed.to_dict(), "status": {"status": status}}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        tail = Tail()
        while True:
            last = not self.running  # looked at before the file: what was written at the end is there, too
            yield from self._lines(tail)
            if last:
                break
            wait([self._ended], LOOK_S)
        self.wait()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        tail = Tail()
        while True:
            last = not self.running
            for line in self._lines(tail):
                yield line
            if last:
                break
            await asyncio.to_thread(wait, [self._ended], LOOK_S)
        self.wait()

    def __await__(self) -> Generator[Any, Any, dict[str, Any]]:
        """``await run`` is `wait` that lets the program's other coroutines go on."""
        return self._result().__await__()

    async def _result(self) -> dict[str, Any]:
        while self.running:
            await asyncio.to_thread(wait, [self._ended], LOOK_S)
        return await asyncio.to_thread(self.wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.stop()
        except BaseException:  # Ctrl-C once more: at once
            self.stop(checkpoint=False)
            raise
        if error is None and not self._told:
            self.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # In a thread: the program's other coroutines go on while the run keeps its checkpoint. The thread goes on, too, if this is
        # cancelled.
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def _lines(self, tail: Tail) -> Iterator[dict[str, Any]]:
        """The events that were written since the last call."""
        file = self.folder / "events.jsonl"
        for text in tail.new_lines(file) if file.exists() else ():
            line: dict[str, Any] = json.loads(text)
            if line["kind"] != SCHEMA:
                yield as_one(line) if line["kind"] == SUMS else line

    def _follow(self, report: int, *, watch: bool) -> None:
        """Begin to read what the launcher prints, and to wait for its end. Takes over ``report``."""
        shown = watch and in_notebook()
        reader = Thread(target=self._read, args=(watch and not shown,), name=f"output of {self.folder}", daemon=True)
        reader.start()
        Thread(target=self._wait, args=(report, reader), name=f"end of {self.folder}", daemon=True).start()
        if shown:
            self._display = Thread(target=self._show, args=(Output(self),), name=f"display of {self.folder}", daemon=True)
            self._display.start()

    def _read(self, watch: bool) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for data in output:
                line = data.decode(errors="replace").rstrip("\n")
                self._said.append(line)
                if watch:
                    print(line, flush=True)

    def _show(self, output: Output) -> None:
        """Show the run in a notebook until it has ended."""
        while wait([self._ended], SHOW_S).not_done:
            output.show(self)
        output.show(self)

    def _end(self, timeout: float | None) -> int:
        """The exit code, once the run has ended and the notebook says so. Raises `TimeoutError`."""
        code = self._ended.result(timeout)
        if self._display is not None:
            self._display.join(_LAST_PICTURE_S)
        return code

    def _wait(self, report: int, reader: Thread) -> None:
        code = self._process.wait()
        reader.join(_LAST_LINES_S)
        os.set_blocking(report, False)
        with open(report, "rb") as file:
            if text := file.read():
                self._report = json.loads(text)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(OSError):
            self.folder.rmdir()  # it is empty if the run has not begun
        self._ended.set_result(code)

    def _failure(self, code: int) -> dict[str, Any]:
        """What is known of a failure, as error reports have it."""
        exit_code = 128 - code if code < 0 else code
        with suppress(FileNotFoundError):
            written = json.loads((self.folder / "error.json").read_text(encoding="utf-8"))
            return {"verdict": "internal", "exit_code": exit_code, **written}
        if self._report:
            return self._report
        if code < 0:
            said = f"its launcher was killed by signal {-code} ({signal.Signals(-code).name})"
            return {"verdict": "host lost", "exit_code": exit_code, "message": said}
        summary = self.summary
        said = "\n".join(self._said) or "its launcher has said nothing"
        if summary is None or summary["status"] == "done":  # Python itself ended, or not everything was kept
            return {"verdict": "internal" if summary is None else "topology", "exit_code": exit_code, "message": said}
        return {
            "verdict": "interrupted",
            "exit_code": exit_code,
            "message": f"it was {summary['status']}, but not by LaunchedRun.stop",
        }


def _folder(name: str, given: str | os.PathLike[str] | None) -> Path:
    """The run directory, made. Raises `UsageError`."""
    try:
        if given is None:
            return next_folder(Path("runs"), name).absolute()
        folder = Path(given).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"the run directory {folder} is not empty: choose another run_dir")
    except OSError as error:
        raise UsageError(f"cannot make a run directory: {error}. Choose a writable folder with run_dir") from error
    return folder
