"""The simulated world: virtual time, modelled hosts and links, faults on a schedule.

In the public interface ``zmqtrain.simulate(topology)`` is a function, `zmqtrain.simulate.run.simulate`. A package's name and a
function's are one attribute of `zmqtrain`, so this package can be called, and is that function.
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
