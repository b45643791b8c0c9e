"""Which signals mean that a machine is about to be taken away, which processes ignore them, and what SIGTERM means otherwise.

SIGUSR1 always means it. SIGTERM means it, too, with the engines of schedulers that send it as a warning, or with
``ZMQTRAIN_ON_TERM=checkpoint`` in the environment. `zmqtrain.run.preemption` says what happens then.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

ON_TERM = "ZMQTRAIN_ON_TERM"
#: Engines whose scheduler sends SIGTERM some time before it kills.
_ENGINES = ("slurm",)


def wanted_on_sigterm(engine: str = "") -> bool:
    """Whether SIGTERM means that machines are about to be taken away, rather than that the user wants the run to end."""
    return engine in _ENGINES or os.environ.get(ON_TERM) == "checkpoint"


def heed_no_preemption() -> None:
    """Ignore these signals in this process and those that it forks: the launcher and the agents handle them."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if wanted_on_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def leave_terminal_to_launcher() -> None:
    """Ignore Ctrl-C and a closed terminal in this process and those that it forks: the launcher stops everything in order."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends this command as Ctrl-C does, while no event loop of a run handles it. For functions, too, as a decorator."""

    def interrupt(*_: object) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background by a script's shell
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
