"""As `zmqtrain.launcher.script_child`, of processes that run a script which does without torch's compiler
(`zmqtrain.launcher.entries`): it is imported in those that compile something even so."""

from __future__ import annotations

from zmqtrain.train import compiler

compiler.postpone()  # before modules below mark functions

import zmqtrain.embed.session  # noqa: E402, F401
from zmqtrain.launcher.child import main  # noqa: E402

__all__ = ["main"]
