"""The simulated world: virtual time, modelled hosts and links, faults on a schedule.

In the public interface ``zmqtrain.simulate(topology)`` is the function `zmqtrain.simulate.run.simulate`. This package and that
function are the same attribute of `zmqtrain`, so the package can be called, and behaves as the function.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zmqtrain.simulate.run import Options, Result
    from zmqtrain.topology.schema import Topology


class _Package(ModuleType):
    def __call__(self, topology: Topology, *, seed: int | None = None, options: Options | None = None) -> Result:
        from zmqtrain.simulate.run import simulate

        return simulate(topology, seed=seed, options=options)


sys.modules[__name__].__class__ = _Package
