"""Which signals mean that a machine is about to be taken away, and which processes ignore them.

SIGUSR1 always means it. SIGTERM means it, too, with the engines of schedulers that send it as a warning, or with
``ZMQTRAIN_ON_TERM=checkpoint`` in the environment. `zmqtrain.run.preemption` says what happens then.
"""

from __future__ import annotations

import os
import signal

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
