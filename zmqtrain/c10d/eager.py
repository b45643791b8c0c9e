"""Methods that torch's C++ code calls while a compiled program runs."""

from __future__ import annotations

import types
from typing import TypeVar

import torch._C._dynamo.eval_frame as frames

T = TypeVar("T")


def never_compiled(cls: type[T]) -> type[T]:
    """A class decorator: ``torch.compile`` leaves the methods, and what they call, as they are.

    While a compiled `DistributedDataParallel` runs, every Python function that is entered is compiled, also one that C++ calls; a
    process group and what it does in its threads cannot be. (`torch.compiler.disable` would do the same, and takes a second to
    import.)
    """
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for method in vars(cls).values():
        if isinstance(method, types.FunctionType):
            frames.set_code_exec_strategy(method.__code__, skip)
    return cls
