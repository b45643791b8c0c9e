"""Error reports: what a failing process leaves, as plain values, so that the launcher can show the first one that matters."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Mapping
from typing import Any

from zmqtrain.errors import ZmqTrainError
from zmqtrain.net.endpoint import PeerId

#: A traceback is cut in its middle beyond this: deep recursion repeats itself.
LONGEST_TRACEBACK = 16_000
#: What a process exits with whose own code, or a library it uses, raised anything at all.
USER_CODE = 3


def report_of(error: BaseException, peer: PeerId) -> dict[str, Any]:
    """The report of an error that ended a role or a launcher."""
    cause = root_of(error)
    known = cause if isinstance(cause, ZmqTrainError) else None
    text = "".join(traceback.format_exception(cause))
    if len(text) > LONGEST_TRACEBACK:
        half = LONGEST_TRACEBACK // 2
        text = f"{text[:half]}\n  ... {len(text) - LONGEST_TRACEBACK} characters left out ...\n{text[-half:]}"
    return {
        "peer": peer,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "type": type(cause).__name__,
        "message": str(cause) or type(cause).__name__,
        "traceback": text,
        "verdict": known.verdict if known else "user code",
        "exit_code": known.exit_code if known else USER_CODE,
        "consequence": known.consequence if known else False,
    }


def root_of(error: BaseException) -> BaseException:
    """The error inside groups of errors that matters most: the first one that does not only follow from another."""
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if not getattr(leaf, "consequence", False)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def headline(report: Mapping[str, Any]) -> str:
    """One line about a report."""
    return f"{report['peer']} failed ({report['verdict']}): {report['type']}: {report['message']}"
