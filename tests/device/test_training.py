"""Training on a device with memory of its own: the numbers of the CPU, and nothing waited for that need not be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.merged_fc.test_training import network, recipe_of
from tests.precision import close
from tests.train.local_exchange import LocalExchange
from tests.train.world import Recipe, Run, run, topology_of
from zmqtrain.arena import Arena, shared_memory_missing
from zmqtrain.data.loader import Batch
from zmqtrain.events import NullRecorder
from zmqtrain.exchange.base import Optimize
from zmqtrain.topology.placement import RolePlacement
from zmqtrain.train.device.accelerator import accelerator_of
from zmqtrain.train.device.streams import AcceleratorDevice
from zmqtrain.train.replica import ReplicaSettings, TorchReplica
from zmqtrain.train.step import STEPS_LOOKED_AT, StepSettings, TrainStep

KINDS: dict[str, dict[str, Any]] = {
    "allreduce": {"exchange": {"kind": "allreduce"}},
    "every": {"exchange": {"kind": "allreduce", "every": 2}},
    "clipped": {"exchange": {"kind": "allreduce"}, "optimizer": {"clip_norm": 0.1}},
    "server": {"exchange": {"kind": "model_server", "staleness": "sync", "shards": 2}},
    "gossip": {"exchange": {"kind": "gossip"}, "compute": {"groups": 2, "group_size": 1}},
    "averaging": {"exchange": {"kind": "averaging"}, "compute": {"groups": 2, "group_size": 2}},
    "accumulating": {"exchange": {"kind": "allreduce"}, "compute": {"group_size": 2, "accumulate": 3}},
    "at the end": {"exchange": {"kind": "allreduce"}, "compute": {"group_size": 2, "overlap": False}},
}


#: The same runs on the CPU.
ON_THE_CPU: dict[str, tuple[Recipe, Run]] = {}


def device_of(device: torch.device) -> AcceleratorDevice:
    accelerator = accelerator_of(device)
    assert accelerator is not None
    return AcceleratorDevice(accelerator, device)


def numbered(device: torch.device, role: RolePlacement) -> torch.device:
    """Another device for each worker of a grid, which in truth has a process of its own: torch has one thread for the backwards of
    all that compute on a device, and there they would wait for each other."""
    return torch.device(device.type, role.local_rank if role.kind == "worker" else 0)


async def both(
    topology: Any, recipe: Callable[[], Recipe], device: torch.device, *, apart: bool = False, **more: Any
) -> list[tuple[Recipe, Run]]:
    """The same run on the device and on the CPU. ``apart``: each worker has a device of its own."""
    found = []
    for where in (device, None):
        made = recipe()
        make = None if where is None else (lambda role, where=where: device_of(numbered(where, role) if apart else where))
        result = await run(topology, made, make_device=make, **(more if where is not None else {}))
        assert not result.errors, result.errors
        found.append((made, result))
    return found


def alike(found: list[tuple[Recipe, Run]], peer: str = "worker/0") -> None:
    (ours, our_run), (theirs, their_run) = found
    for name, tensor in theirs.models[peer].state_dict().items():
        close(ours.models[peer].state_dict()[name].cpu(), tensor, name)
    assert our_run.losses(peer) == pytest.approx(their_run.losses(peer), rel=1e-9)
    for one, other in zip(our_run.recorders[peer].of("eval"), their_run.recorders[peer].of("eval"), strict=True):
        assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-9)


#: Each once; all-reduce both in the host's memory and by messages, and so each kind of sums.
WAYS = [(kind, kind in ("clipped", "averaging", "accumulating")) for kind in KINDS] + [("allreduce", True)]


@pytest.mark.parametrize(("kind", "shared"), WAYS)
async def test_it_trains_as_the_cpu_does(kind: str, shared: bool, device: torch.device) -> None:
    """Workers that share the device; with ``shared`` they sum in memory of the host that both have pinned."""
    if shared and shared_memory_missing() is not None:
        pytest.skip(str(shared_memory_missing()))
    sections = {"compute": {"group_size": 2}, **KINDS[kind]}
    topology = topology_of(
        **sections | {"job": {"steps": 4, "eval_every": 2}, "compute": {"batch_size": 24, **sections["compute"]}}
    )
    more = {"region": Arena.create(8, 1 << 20)} if shared else {}
    ours = Recipe()
    result = await run(topology, ours, make_device=lambda _role: device_of(device), **more)
    assert not result.errors, result.errors
    if kind not in ON_THE_CPU:
        theirs = Recipe()
        ON_THE_CPU[kind] = theirs, await run(topology, theirs)
    alike([(ours, result), ON_THE_CPU[kind]])


async def test_images_with_statistics_and_channels_last(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(48, 2, 8, 8, generator=generator).double(), torch.arange(48) % 3)

    def recipe() -> Recipe:
        def model() -> nn.Module:
            torch.manual_seed(2)
            layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)]
            return nn.Sequential(*layers).double()

        return Recipe(model=model, train_data=data, eval_data=data, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))

    compute = {"batch_size": 12, "group_size": 2, "channels_last": True, "keep_memory": False}
    alike(await both(topology_of(job={"steps": 3, "eval_every": 2}, compute=compute), recipe, device))


@pytest.mark.parametrize("grid", ["2x1", "2x2"])
async def test_a_divided_model(grid: str, device: torch.device) -> None:
    rows, columns = map(int, grid.split("x"))
    compute = {"group_size": rows * columns, "batch_size": 12, "grid": grid}
    layers = [{"layer": name, "choice": "model", "grid": grid} for name in ("6", "8")]
    layers += [{"layer": name, "choice": "domain", "grid": grid} for name in ("0", "3")]
    topology = topology_of(job={"steps": 3, "eval_every": 2}, compute=compute, parallel={"layers": layers})
    accelerator = accelerator_of(device)
    assert accelerator is not None
    if accelerator.count() < rows * columns:
        pytest.skip(f"needs {rows * columns} devices in one process; test_processes.py does it on one")
    found = await both(topology, recipe_of, device, apart=True)
    assert found[0][1].losses("worker/0") == pytest.approx(found[1][1].losses("worker/0"), rel=1e-9)
    one, other = (result.recorders["worker/0"].of("eval") for _, result in found)
    assert [each["eval_loss"] for each in one] == pytest.approx([each["eval_loss"] for each in other], rel=1e-9)


async def test_fully_connected_layers_on_a_server(device: torch.device) -> None:
    exchange = {"kind": "model_server", "staleness": "sync", "merged_fc": True}
    compute = {"groups": 2, "group_size": 2, "batch_size": 12, "accumulate": 2}
    found = await both(topology_of(job={"steps": 3, "eval_every": 2}, compute=compute, exchange=exchange), recipe_of, device)
    alike(found)
    assert network().state_dict().keys() >= found[0][0].models["fc/0"].state_dict().keys()


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.05), ("float16", 0.02)])
async def test_mixed_precision_stays_near_float32(precision: str, tolerance: float, device: torch.device) -> None:
    losses = []
    for name, where in ((precision, device), ("float32", None)):
        recipe = Recipe(torch.float32)
        topology = topology_of(job={"steps": 8}, compute={"group_size": 2, "batch_size": 24, "precision": name})
        make = None if where is None else (lambda _role, where=where: device_of(where))
        result = await run(topology, recipe, make_device=make)
        assert not result.errors
        assert all(parameter.dtype == torch.float32 for parameter in recipe.models["worker/0"].parameters())
        losses.append(result.losses("worker/0"))
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


@pytest.mark.parametrize("when", [Optimize.APART, Optimize.AFTER])
async def test_a_step_waits_for_the_device_only_at_its_end(when: Optimize, device: torch.device) -> None:
    """Forward and backward of all micro-batches are queued before anything is read."""
    where, exchange = device_of(device), LocalExchange(when)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)).to(device)
    replica = TorchReplica(model, torch.optim.SGD(model.parameters(), lr=0.1), where, ReplicaSettings(bucket_bytes=100))
    await exchange.start(replica)
    replica.connect(exchange.bucket_ready)
    loss = nn.functional.cross_entropy
    step = TrainStep(replica, loss, where, StepSettings(rank=0, group_batch=8, accumulate=2), NullRecorder())
    x, y = torch.randn(8, 6, device=device), torch.arange(8, device=device) % 5
    for number in range(STEPS_LOOKED_AT, STEPS_LOOKED_AT + 3):  # in the first ones targets are looked at
        exchange.begin_step(number)

        def work(number: int = number) -> None:
            with watched(device):
                step(number, Batch((x,), y, len(x)))

        await where.run(work)
        await exchange.end_step()
    await where.run(replica.take_all)
    await where.close(5)


def watched(device: torch.device) -> Any:
    """Raises where the device is waited for in the middle of its work."""
    if device.type == "cuda":
        return CudaWatched()
    return ApartWatched()


class CudaWatched(nullcontext[None]):
    def __enter__(self) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


class ApartWatched(nullcontext[None]):
    def __enter__(self) -> None:
        self._before = torch.ops.apart.reads()

    def __exit__(self, kind: object, *_: object) -> None:
        assert kind is not None or torch.ops.apart.reads() == self._before, "a number was read from the device"
