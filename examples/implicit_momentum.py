"""Asynchrony begets momentum: g asynchronous groups act like a momentum of 1 - 1/g (Omnivore, theorem 1).

The groups' exchange and the model server are the real coroutines; the network is simulated, and the time that a group computes is
exponentially distributed. The loss is a quadratic with noise in its gradient::

    gradient(w) = curvature * w + noise

    python examples/implicit_momentum.py
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zmqtrain.events import NullRecorder
from zmqtrain.exchange.base import Bucket, OptimizerSpec
from zmqtrain.exchange.model_server import ModelServerExchange
from zmqtrain.exchange.server_settings import ModelServerSettings
from zmqtrain.net.settings import NetSettings
from zmqtrain.server.model_server import ModelServer
from zmqtrain.server.settings import ServerSettings
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.topology.links import NetworkModel, Way
from zmqtrain.wire.tensor import TensorPayload

Numbers = npt.NDArray[np.float64]

#: Learning rate; the curvature is 1.
STEP = 0.1
#: Independent coordinates of the quadratic. They share every delay, but not their noise.
DIMENSIONS = 256
#: Reads back from an update whose noise the fit looks at.
LAGS = 40


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What one run has shown; both of shape (updates, dimensions)."""

    parameters: Numbers
    """After each update at the server."""
    noise: Numbers
    """In the gradient that was computed from those parameters."""


class Quadratic:
    """A group's replica (`zmqtrain.exchange.base.Replica`): one bucket, whose gradient is that of the quadratic."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._parameters, self._gradients = np.zeros(DIMENSIONS), np.zeros(DIMENSIONS)
        payloads = TensorPayload.of(self._parameters), TensorPayload.of(self._gradients)
        self.bucket = Bucket(0, *payloads, 0, ("w",))
        self.ready = asyncio.Event()
        self.noise: list[Numbers] = []
        """Of each step's gradient."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        return (self.bucket,)

    def hyperparameters(self) -> OptimizerSpec:
        return OptimizerSpec("torch.optim:SGD", ({"lr": STEP},))

    def parameters_ready(self, bucket: Bucket) -> None:
        self.ready.set()

    def abort(self, error: BaseException) -> None:
        raise error

    async def update(self, *, gradient_scale: float = 1.0, clip: bool = True) -> None:
        raise AssertionError("the server runs the optimizer")

    def backward(self) -> None:
        noise = self._rng.standard_normal(DIMENSIONS)
        self.noise.append(noise)
        self._gradients[:] = self._parameters + noise


class Watch(NullRecorder):
    """Keeps the server's parameters after each update, and what each update had read."""

    def __init__(self) -> None:
        self.server: ModelServer | None = None
        self.parameters: list[Numbers] = []
        self.reads: list[tuple[int, int, int]] = []  # group, its step, version that it had read

    def audit(self, what: str, /, **values: object) -> None:
        if what == "applied":
            assert self.server is not None
            (entry,) = self.server.entries.values()
            memory = entry.memory()
            assert isinstance(memory, TensorPayload)
            self.parameters.append(memory.numpy().copy())
            self.reads.extend(values["reads"])  # type: ignore[arg-type]


async def experiment(groups: int, updates: int, seed: int) -> Trajectory:
    """Let so many asynchronous groups train until the server has seen ``updates`` updates."""
    root = np.random.default_rng(seed)
    network = SimulatedNetwork(NetworkModel(way=Way(latency=1e-6)), chance=random.Random(seed))
    workers = tuple((f"worker/{group}",) for group in range(groups))
    watch = Watch()
    endpoint = network.endpoint("server/0", "server", NetSettings())
    server = ModelServer(endpoint, ServerSettings(0, tuple(name for (name,) in workers)), recorder=watch)
    watch.server = server
    replicas = [Quadratic(rng) for rng in root.spawn(groups)]
    times = root.spawn(groups)

    async def group(number: int) -> None:
        own = network.endpoint(*workers[number], "host" + str(number), NetSettings())
        settings = ModelServerSettings(number, 0, workers, ("server/0",), policy="async")
        exchange, replica = ModelServerExchange(own, settings), replicas[number]
        await exchange.start(replica)
        step = 0
        while len(watch.parameters) < updates:
            await asyncio.sleep(times[number].exponential())
            replica.backward()
            replica.ready.clear()
            exchange.begin_step(step)
            exchange.bucket_ready(replica.bucket)
            await exchange.end_step()
            await replica.ready.wait()
            step += 1
        await exchange.stop()
        await own.close()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run())
        for number in range(groups):
            tasks.create_task(group(number))
    await endpoint.close()
    parameters = np.array(watch.parameters[:updates])
    noise = np.zeros_like(parameters)
    for number, step, version in watch.reads:
        if 0 < version <= updates:  # version v is what update v left
            noise[version - 1] = replicas[number].noise[step]
    return Trajectory(parameters, noise)


def fit(trajectory: Trajectory) -> tuple[float, float]:
    """The momentum and the learning rate that a trajectory shows.

    In expectation, given all that happened before update t, theorem 1 says V[t+1] = m V[t] - a W[t], with V[t+1] = W[t+1] - W[t].
    The noise of gradients that were computed before then is among what happened, and is known here; it is independent of all other
    noise and of the delays. So the correlations of both sides with it must be equal, for each of the last `LAGS` reads: an
    overdetermined linear system for m and a, solved by least squares. (Regressing V[t+1] on V[t] and W[t] themselves is biased: a
    group's gradient is in flight for several updates, and correlates with both.)
    """
    w, noise = trajectory.parameters, trajectory.noise
    t = np.arange(LAGS + 1, len(w) - 1)
    following, before, now = w[t + 1] - w[t], w[t] - w[t - 1], w[t]
    rows = [[np.sum(noise[t - lag] * before), -np.sum(noise[t - lag] * now)] for lag in range(1, LAGS + 1)]
    answers = [np.sum(noise[t - lag] * following) for lag in range(1, LAGS + 1)]
    (momentum, rate), *_ = np.linalg.lstsq(np.array(rows), np.array(answers), rcond=None)
    return float(momentum), float(rate)


def measure(groups: Sequence[int], updates: int, seed: int) -> Mapping[int, tuple[float, float]]:
    """Fitted momentum and learning rate for each number of groups."""
    return {number: fit(run_virtual(experiment(number, updates, seed))) for number in groups}


if __name__ == "__main__":
    print("groups  fitted momentum  1 - 1/g")
    for number, (momentum, _) in measure((1, 2, 4, 8, 16), updates=3000, seed=1).items():
        print(f"{number:6d}  {momentum:15.3f}  {1 - 1 / number:7.3f}")
