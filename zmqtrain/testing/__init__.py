"""Public helpers for tests of your own code: virtual time, networks without sockets, simulated runs and their faults.

::

    from zmqtrain.testing import Options, faults, simulate, virtual_time

    def test_my_job_survives_a_slow_host():
        result = simulate(topology, options=Options(faults=[faults.slow("beta", 5.0, at=1.0)]))
        assert result.ending.status == "done" and not result.broken

    @virtual_time(seed=3)
    async def test_my_protocol():                       # a second of it takes no real time
        network = SimulatedNetwork(NetworkModel(bandwidth=1e9, way=Way(latency=1e-3)), random.Random(3))
        a, b = network.endpoint("a", "alpha"), network.endpoint("b", "beta")
        ...
"""

from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.run import faults
from zmqtrain.run.faults import Fault
from zmqtrain.simulate.clock import VirtualLoop, run_virtual
from zmqtrain.simulate.explore import Trial, explore
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.simulate.process import Process
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.testing.virtual import virtual_time
from zmqtrain.topology.links import HostLink, NetworkModel, RackLink, Way

__all__ = [
    "Fault",
    "HostLink",
    "MemoryNetwork",
    "NetworkModel",
    "Options",
    "Process",
    "RackLink",
    "Result",
    "SimulatedNetwork",
    "Trial",
    "VirtualLoop",
    "Way",
    "explore",
    "faults",
    "run_virtual",
    "simulate",
    "virtual_time",
]
