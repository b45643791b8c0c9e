"""Log lines of simulated processes: they are delivered under the name of the process that wrote them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.net.endpoint import PeerId
from zmqtrain.simulate.process import current_process

#: Takes a log line of a process.
Log = Callable[[PeerId, str], None]


@contextmanager
def logs_to(log: Log) -> Iterator[None]:
    """A context in which all log lines of zmqtrain go to ``log``, with the name of the process that wrote them."""
    logger = logging.getLogger("zmqtrain")
    handler, before = _Handler(log), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


class _Handler(logging.Handler):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        process = current_process()
        self._log(COORDINATOR if process is None else process.name, record.getMessage())
