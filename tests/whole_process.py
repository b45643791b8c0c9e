"""What holds for all tests of a process."""

from __future__ import annotations

import logging

import torch
from hypothesis import HealthCheck, settings

from zmqtrain.data.seeding import seed_torch
from zmqtrain.train.compiler import postpone


def prepare(profile: str | None) -> None:
    """Before the first test is read.

    Args:
        profile: of hypothesis, where the command line names one.
    """
    # As in the roles of a launch: marks for the compiler, which no test here uses, are 7 % of the time of small divided models.
    postpone()
    # pytest adds its handlers to each logger that keeps its messages to itself, and takes them away, six times a test. Torch has
    # forty such loggers: 0.4 of the 1.1 ms that an empty test takes. Messages that are handed on reach the same handlers.
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True
    # The stack of a test is deep, and torch would keep a trace of it for devices that are not here: 3 ms a call.
    torch.manual_seed = seed_torch

    settings.register_profile(
        "fast", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    if profile is None:
        settings.load_profile("fast")
