"""The replica trains exactly as plain torch does, hands buckets over in order, and holds the forward back at closed gates."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import torch
from torch import nn

from tests.pairwise import pairwise
from tests.train.local_exchange import LocalExchange
from zmqtrain.errors import PeerTimeoutError, TaskError
from zmqtrain.exchange.base import Bucket, Optimize
from zmqtrain.train.device.cpu import CpuDevice
from zmqtrain.train.replica import ReplicaSettings, TorchReplica


class Tied(nn.Module):
    """An embedding whose weights are the last layer's too, and one layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(4, 5)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed((x[:, 0] * 10).long() % 5)))


class Attention(nn.Module):
    """``nn.MultiheadAttention`` uses the weights of its child ``out_proj`` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)[:, None]
        return self.last(self.attention(h, h, h)[0][:, 0])


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, (1, 3), bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.norm(self.convolution(x[:, None, None, :]))).flatten(1))


class ReadEarly(nn.Module):
    """Reads weights before it calls their layer: in the hook of a layer, and in a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 5)
        self.last.register_forward_pre_hook(lambda layer, inputs: (inputs[0] + layer.weight.sum(),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = torch.cat([self.last.bias, self.first.bias]).square().sum() + self.second.weight.detach().abs().mean()
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x))))) * (1 + penalty)


class Derived(nn.Module):
    """Computes the derivative of a layer within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, back = torch.func.vjp(lambda given: self.second(torch.tanh(self.first(given))), x)
        return found + back(torch.ones_like(found))[0][:, :5]  # type: ignore[no-any-return]


class InTurn(nn.Module):
    """Calls its last layer in every other step only, and uses its weights in each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.steps = nn.Linear(6, 7), nn.Linear(7, 5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        h = torch.tanh(self.first(x))
        return self.last(h) if self.steps % 2 else nn.functional.linear(h, self.last.weight * 2, self.last.bias)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 5)),
    "tied": Tied,
    "attention": Attention,
    "images": Images,
    "read early": ReadEarly,
    "a derivative in the forward": Derived,
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": [q for q in p if q.dim() > 1]}, {"params": [q for q in p if q.dim() == 1], "weight_decay": 0.0}], lr=0.01
    ),
}


@pytest.fixture
async def device() -> AsyncIterator[CpuDevice]:
    device = CpuDevice()
    yield device
    await device.close(5)


def step(replica: TorchReplica, index: int, x: torch.Tensor, y: torch.Tensor, micro_batches: int = 1) -> None:
    """One training step in the compute thread."""
    replica.begin_step(index)
    for number, (xs, ys) in enumerate(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)):
        with replica.forward():
            output = replica.model(xs)
        loss = nn.functional.cross_entropy(output, ys) * (len(xs) / len(x))
        replica.begin_backward(last=number == micro_batches - 1)
        loss.backward()
        replica.end_backward()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.rand(8, 6, generator=generator, dtype=torch.float64), torch.randint(5, (8,), generator=generator))
        for _ in range(count)
    ]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float, micro_batches: int) -> None:
    for x, y in batches(5):
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            (nn.functional.cross_entropy(model(xs), ys) * (len(xs) / len(x))).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@pairwise(
    {
        "name": list(MODELS),
        "optimizer": list(OPTIMIZERS),
        "clip, micro_batches, bucket_bytes, when": [
            (0.0, 1, 1, Optimize.APART),
            (0.1, 2, 200, Optimize.APART),
            (0.0, 1, 1 << 20, Optimize.APART),
            (0.0, 1, 200, Optimize.BEFORE),
            (0.0, 2, 1, Optimize.BEFORE),
            (0.0, 1, 200, Optimize.AFTER),
            (0.0, 2, 1 << 20, Optimize.AFTER),
        ],
    }
)
async def test_replica_trains_as_plain_torch(
    name: str, optimizer: str, clip: float, micro_batches: int, bucket_bytes: int, when: Optimize, device: CpuDevice
) -> None:
    torch.manual_seed(1)
    expected = MODELS[name]().double()
    model = copy.deepcopy(expected)
    torch.manual_seed(2)
    plain(expected, OPTIMIZERS[optimizer](list(expected.parameters())), clip, micro_batches)

    settings = ReplicaSettings(bucket_bytes=bucket_bytes, clip_norm=clip, overlap=bucket_bytes != 1)
    replica = TorchReplica(model, OPTIMIZERS[optimizer](list(model.parameters())), device, settings)
    exchange = LocalExchange(when)
    await exchange.start(replica)
    replica.connect(exchange.bucket_ready)
    torch.manual_seed(2)
    for index, (x, y) in enumerate(batches(5)):
        exchange.begin_step(index)
        await device.run(lambda index=index, x=x, y=y: step(replica, index, x, y, micro_batches))
        await exchange.end_step()
        assert exchange.order == list(range(len(replica.buckets)))
    await device.run(replica.take_all)
    for (parameter_name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15, msg=parameter_name)
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_layer_that_is_called_in_some_steps_only_is_never_read_before_its_update(overlap: bool, device: CpuDevice) -> None:
    torch.manual_seed(1)
    expected = InTurn().double()
    model = copy.deepcopy(expected)
    plain(expected, OPTIMIZERS["sgd"](list(expected.parameters())), 0.0, 1)
    settings = ReplicaSettings(bucket_bytes=1, overlap=overlap)
    replica = TorchReplica(model, OPTIMIZERS["sgd"](list(model.parameters())), device, settings)
    exchange = LocalExchange(Optimize.BEFORE)
    await exchange.start(replica)
    replica.connect(exchange.bucket_ready)

    async def train() -> None:
        for index, (x, y) in enumerate(batches(5)):
            exchange.begin_step(index)
            await device.run(lambda index=index, x=x, y=y: step(replica, index, x, y))
            await exchange.end_step()

    if overlap:
        with pytest.raises(TaskError, match=r"'last\.bias' was used in a step that did not call its layer"):
            await train()
        return
    await train()
    await device.run(replica.take_all)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


async def test_shared_parameters_lie_in_one_bucket_once(device: CpuDevice) -> None:
    model = Tied()
    replica = TorchReplica(model, torch.optim.SGD(model.parameters(), lr=1), device, ReplicaSettings(bucket_bytes=1))
    names = [name for bucket in replica.buckets for name in bucket.names]
    assert names == ["out.bias", "unused.bias", "unused.weight", "embed.weight"]
    assert model.out.weight is model.embed.weight


async def test_the_forward_waits_at_each_layer_for_its_own_bucket_only(device: CpuDevice) -> None:
    model = Attention()
    replica = TorchReplica(model, torch.optim.SGD(model.parameters(), lr=0.1), device, ReplicaSettings(bucket_bytes=1))
    handed: list[Bucket] = []
    replica.connect(handed.append)
    x, y = torch.rand(8, 6), torch.randint(5, (8,))
    await device.run(lambda: step(replica, 0, x, y))
    reached = {name: threading.Event() for name in ("first", "attention", "last")}
    for name, event in reached.items():
        model.get_submodule(name).register_forward_pre_hook(lambda *_, event=event: event.set())
    await asyncio.sleep(0)
    assert [bucket.index for bucket in handed] == list(range(len(replica.buckets)))
    second = asyncio.create_task(device.run(lambda: step(replica, 1, x, y)))
    # Buckets are handed back one by one, the first layer's first; each layer is reached when its last one is there, not before.
    for layer, event in reached.items():
        for bucket in sorted(handed, key=lambda bucket: -bucket.index):
            if bucket.names[0].startswith(layer):
                assert not event.is_set()
                bucket.parameters.scale_(0.0)
                replica.parameters_ready(bucket)
        assert await asyncio.to_thread(event.wait, 5)
    await second
    assert not any(parameter.any() for parameter in model.parameters())


async def test_waiting_for_parameters_ends_at_the_time_out_and_when_aborted(device: CpuDevice) -> None:
    model = nn.Linear(6, 5)
    settings = ReplicaSettings(gate_timeout_s=0.01)
    replica = TorchReplica(model, torch.optim.SGD(model.parameters(), lr=0.1), device, settings)
    replica.connect(lambda bucket: None)
    x, y = torch.rand(8, 6), torch.randint(5, (8,))
    await device.run(lambda: step(replica, 0, x, y))
    with pytest.raises(PeerTimeoutError, match="parameters of bucket 0"):
        await device.run(lambda: step(replica, 1, x, y))
    replica.abort(TaskError("halted"))
    with pytest.raises(TaskError, match="halted"):
        await device.run(lambda: step(replica, 1, x, y))


async def test_a_loop_that_zeroes_gradients_itself_does_no_harm(device: CpuDevice) -> None:
    torch.manual_seed(1)
    model = nn.Linear(6, 5)
    replica = TorchReplica(model, torch.optim.SGD(model.parameters(), lr=0.1), device)
    exchange = LocalExchange()
    await exchange.start(replica)
    replica.connect(exchange.bucket_ready)
    model.zero_grad(set_to_none=True)
    exchange.begin_step(0)
    await device.run(lambda: step(replica, 0, torch.rand(8, 6), torch.randint(5, (8,))))
    assert model.weight.grad is not None
    assert model.weight.grad.data_ptr() != model.weight.data_ptr()
    assert replica.buckets[0].gradients.tensor.abs().sum() > 0  # type: ignore[attr-defined]


async def test_a_sparse_gradient_is_refused_with_what_to_do(device: CpuDevice) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(4, 5))
    replica = TorchReplica(model, torch.optim.SGD(model.parameters(), lr=0.1), device)
    replica.connect(lambda _: None)

    def one() -> None:
        step(replica, 0, torch.tensor([[1], [2]]), torch.tensor([0, 1]))

    with pytest.raises(TaskError, match=r"parameter '0\.weight' got a sparse gradient.*sparse=False"):
        await device.run(one)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
async def test_a_scripted_model_gets_no_hooks_inside(device: CpuDevice) -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(6, 5)))
    replica = TorchReplica(model, torch.optim.SGD(model.parameters(), lr=0.1), device)
    replica.connect(lambda bucket: None)
    await device.run(lambda: step(replica, 0, torch.rand(8, 6), torch.randint(5, (8,))))
    assert replica.buckets[0].gradients.tensor.abs().sum() > 0  # type: ignore[attr-defined]
