"""As `zmqtrain.launcher.child`, of processes that run tasks: torch's compiler is imported in those that compile something."""

from __future__ import annotations

from zmqtrain.train import compiler

compiler.postpone()  # before modules below mark functions

from zmqtrain.launcher.child import main  # noqa: E402

__all__ = ["main"]
