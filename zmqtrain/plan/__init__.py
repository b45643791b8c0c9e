"""The best shape for a job, and the reasons: cost models and the planner.

In the public interface ``zmqtrain.plan(target)`` is the function `zmqtrain.plan.program.plan`. This package and that function are
the same attribute of `zmqtrain`, so the package can be called, and behaves as the function.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *args: Any, **settings: Any) -> Any:
        from zmqtrain.plan.program import plan

        return plan(*args, **settings)


sys.modules[__name__].__class__ = _Package
