"""The simulated world: virtual time, modelled hosts and links, faults on a schedule.

In the public interface ``zmqtrain.simulate(target)`` is the function `zmqtrain.simulate.program.simulate`. This package and that
function are the same attribute of `zmqtrain`, so the package can be called, and behaves as the function.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *args: Any, **settings: Any) -> Any:
        from zmqtrain.simulate.program import simulate

        return simulate(*args, **settings)


sys.modules[__name__].__class__ = _Package
