"""Torch functions that have a rule above autograd: those of layers, which compute on parts with messages of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zmqtrain.parallel.once import no_forward_mode

#: By function. ``NotImplemented`` leaves the call to the rules of its operators.
FUNCTIONS: dict[Any, Callable[..., Any]] = {torch._VF._make_dual: no_forward_mode}
#: Functions whose rules are given tensors with two divided dimensions as they are; the others get them with one.
BOTH: set[Any] = set()
#: Functions that compute each sample by itself, or sum over samples wherever they are. In a layer that the plan has
#: batch-parallel, each process gives them its own share of the samples.
BY_SAMPLES: set[Any] = set()


def function(*functions: Any, both: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the rule of some functions. ``both``: it knows tensors of which two dimensions are divided."""

    def register(found: Callable[..., Any]) -> Callable[..., Any]:
        for each in functions:
            FUNCTIONS[each] = found
            if both:
                BOTH.add(each)
        return found

    return register
