"""Processes of a benchmark, of which the first one says what was measured."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from typing import Any

from zmqtrain.errors import ZmqTrainError


def said_by_first(starts: Iterable[subprocess.Popen[str]], what: str, *, timeout_s: float) -> Any:
    """Start the processes, and wait for all of them; none is left.

    Args:
        starts: starts one after another, with both outputs in pipes.
        what: what they are, for errors.
        timeout_s: of each.

    Returns the JSON of the last line that the first one has printed. Raises `ZmqTrainError` if any of them fails.
    """
    ranks: list[subprocess.Popen[str]] = []
    try:
        ranks.extend(starts)
        said = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise ZmqTrainError(f"{what} failed:\n{next(err for _, err in said if err)[-2000:]}")
    return json.loads(said[0][0].splitlines()[-1])
