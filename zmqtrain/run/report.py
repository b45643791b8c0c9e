"""Error reports: what a failing process leaves, as plain values, so that the cause of a failure can be shown."""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zmqtrain.errors import ZmqTrainError
from zmqtrain.net.endpoint import PeerId
from zmqtrain.world import wall_s

#: The kind of the events that carry a role's output to the run's record.
LOG = "log"
#: A longer traceback is cut in the middle: deep recursion repeats itself.
LONGEST_TRACEBACK = 16_000
#: Folders of frames that are not the user's code: this package, and the standard library (with asyncio and runpy).
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_LIBRARY = str(Path(traceback.__file__).parent) + os.sep
#: What errors without a text mean here.
_UNSAID: dict[type[BaseException], str] = {
    KeyboardInterrupt: "the program itself raised it; Ctrl-C reaches the launcher alone",
    asyncio.CancelledError: "the program itself cancelled what it was doing",
}
#: The exit code of a process in which the user's code, or a library that it uses, raised an error.
USER_CODE = 3


def report_of(error: BaseException, peer: PeerId) -> dict[str, Any]:
    """The report of an error that ended a role or a launcher."""
    cause = root_of(error)
    known = cause if isinstance(cause, ZmqTrainError) else None
    return {
        "peer": peer,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": wall_s(),
        "type": type(cause).__name__,
        "message": str(cause) or _UNSAID.get(type(cause), type(cause).__name__),
        "traceback": _cut("".join(traceback.format_exception(cause))),
        "shown": _cut(_for_people(cause)),
        "verdict": known.verdict if known else "user code",
        "exit_code": known.exit_code if known else USER_CODE,
        "consequence": known.consequence if known else False,
    }


def _for_people(error: BaseException) -> str:
    """The traceback of the user's code, without the frames that called it. Empty if no code of the user is involved."""
    if isinstance(error, ZmqTrainError):
        if error.__cause__ is None or error.verdict != "user code":
            return ""
        error = error.__cause__
    trace = traceback.TracebackException.from_exception(error)
    own = [not frame.filename.startswith((_PACKAGE, _LIBRARY, "uvloop/", "<frozen")) for frame in trace.stack]
    if True in own:
        trace.stack = traceback.StackSummary.from_list(trace.stack[own.index(True) :])
    return "".join(trace.format(chain=False))


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TRACEBACK:
        return text
    half = LONGEST_TRACEBACK // 2
    return f"{text[:half]}\n  ... {len(text) - LONGEST_TRACEBACK} characters left out ...\n{text[-half:]}"


def root_of(error: BaseException) -> BaseException:
    """The most relevant error inside exception groups: the first one that is not a consequence of another."""
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if not getattr(leaf, "consequence", False)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def headline(report: Mapping[str, Any]) -> str:
    """A report as one line."""
    return f"{report['peer']} failed ({report['verdict']}): {report['type']}: {report['message']}"
