"""As `zmqtrain.launcher.child`, of processes that may use torch's compiler, as scripts do with any optimizer and with
`DistributedDataParallel`: it is imported once for all of them."""

from __future__ import annotations

import torch._dynamo  # noqa: F401 - takes over a second

from zmqtrain.launcher.child import main

__all__ = ["main"]
