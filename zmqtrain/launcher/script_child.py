"""As `zmqtrain.launcher.child`, of processes that may run scripts: what these import is imported once for all of them, and so is
torch's compiler, which optimizers and `DistributedDataParallel` import."""

from __future__ import annotations

import torch._dynamo  # noqa: F401 - takes over a second

import zmqtrain.embed.session  # noqa: F401
from zmqtrain.launcher.child import main

__all__ = ["main"]
