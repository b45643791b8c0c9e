"""Which signals mean that a machine is about to be taken away, and which processes leave them to others.

SIGUSR1 means it everywhere. Schedulers that say it by SIGTERM are understood, too, where the engine is theirs or
``ZMQTRAIN_ON_TERM=checkpoint`` is in the environment. What follows is `zmqtrain.run.preemption`.
"""

from __future__ import annotations

import os
import signal

ON_TERM = "ZMQTRAIN_ON_TERM"
#: Engines whose scheduler sends SIGTERM some time before it kills.
_ENGINES = ("slurm",)


def wanted_on_sigterm(engine: str = "") -> bool:
    """Whether SIGTERM means that machines are taken away, rather than that a person wants the run to end."""
    return engine in _ENGINES or os.environ.get(ON_TERM) == "checkpoint"


def heed_no_preemption() -> None:
    """This process and those that it forks are not the ones to be told: the launcher and agents are, and see to them."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if wanted_on_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
