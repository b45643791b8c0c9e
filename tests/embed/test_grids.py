"""Sessions whose groups divide the model over a grid: the ordinary loop is one process's training, or refused with a reason."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import zmqtrain
from tests.embed.loops import ALLREDUCE, AVERAGING, GOSSIP, ROWS, SYNC, Loop
from tests.embed.test_loops import EXCHANGES, in_one_process, parameters
from tests.embed.world import run_sessions, topology_of
from tests.launcher.launched import Launched
from zmqtrain.data.background import BackgroundThread
from zmqtrain.data.partition import even_bounds
from zmqtrain.embed.core import Core
from zmqtrain.embed.own_run import OwnRun, open_run
from zmqtrain.embed.session import AsyncSession, Session
from zmqtrain.errors import DifferentModelError, RunStopped, TaskError, UsageError, ZmqTrainError
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.topology.schema import Topology

Refusal = type[ZmqTrainError]


def grid_of(
    grid: str = "2x1", layers: dict[str, tuple[str, str]] | None = None, *, verify: bool = False, **sections: Any
) -> Topology:
    rows, columns = map(int, grid.split("x"))
    compute = {"group_size": rows * columns, "grid": grid, "batch_size": 7, "bucket_size": 256, **sections.pop("compute", {})}
    named = [{"layer": layer, "choice": choice, "grid": over} for layer, (choice, over) in (layers or {}).items()]
    return topology_of(compute=compute, parallel={"layers": named, "verify": verify}, **sections)


#: By name of the loop, the exchange with which it runs.
EQUAL = {
    "adam": SYNC,
    "evaluation": GOSSIP,
    "clip_norm": ALLREDUCE,
    "session_clip": AVERAGING,
    "scaler": ALLREDUCE,
    "accumulating_clipped": SYNC,
    "inspected": AVERAGING,
}


@pytest.mark.filterwarnings("ignore")  # torch has opinions about some of these loops
@pytest.mark.parametrize("name", EQUAL)
def test_a_loop_is_one_process(name: str) -> None:
    """Two groups, each of which divides the model between two workers with the same samples."""
    each = next(each for each in ROWS if each.run.__name__ == name)
    loops: dict[int, Loop] = {}

    def program(session: Session) -> None:
        place = session.group if EQUAL[name] in (ALLREDUCE, SYNC) else 0
        loops[session.rank] = loop = Loop(session, [place], each.dtype)
        each.run(loop)

    run_sessions(grid_of(compute={"groups": 2}, exchange=EXCHANGES[EQUAL[name]]), program)
    expected, seen = in_one_process(each.name, (0, 1) if EQUAL[name] in (ALLREDUCE, SYNC) else (0,))
    for loop in loops.values():
        torch.testing.assert_close(parameters(loop), expected, rtol=1e-11, atol=1e-12)
        assert loop.seen == pytest.approx(seen, rel=1e-9, abs=1e-9)


SAMPLES = 21


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(SAMPLES, 2, 6, 6, generator=generator, dtype=torch.float64), torch.arange(SAMPLES) % 3)


class Convolutions(nn.Module):
    """With buffers, a layer whose backward is computed again, and an output that some call by another method."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(144, 3)

    def forward(self, inputs: Tensor) -> Any:
        found = torch.relu(self.norm(self.first(inputs)))
        found = checkpoint(lambda value: torch.relu(self.second(value)), found, use_reentrant=False)
        return self.last(found.flatten(1))  # type: ignore[union-attr]

    def classes(self, inputs: Tensor) -> Any:
        return self(inputs).argmax(1)


def made(make: Callable[[], nn.Module] = Convolutions) -> nn.Module:
    """Always the same, without torch's generator, which the threads share."""
    model = make().double()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> list[float]:
    """An ordinary loop, which evaluates another number of samples between forward and backward."""
    seen = []
    for inputs, target in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        model.eval()
        with torch.no_grad():
            seen.append(float(model.classes(inputs[:1]).sum()))  # type: ignore[operator]
        model.train()
        loss.backward()
        optimizer.step()
    return seen


def alone(epochs: int, batch_size: int) -> nn.Module:
    with zmqtrain.session() as session:  # for the order of samples only
        batches = [batch for epoch in range(epochs) for batch in session.batches(images(), epoch, batch_size=batch_size)]
    model = made()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batches)
    return model


PLANS: dict[str, dict[str, tuple[str, str]]] = {
    "model": {},
    "strips": {"first": ("domain", "2x2"), "second": ("domain", "2x2"), "last": ("model", "2x2")},
    "samples at last": {"first": ("model", "2x2"), "last": ("batch", "2x2")},
}


@pytest.mark.parametrize("plan", PLANS)
def test_plans_with_uneven_columns(plan: str) -> None:
    """Seven samples for two columns, which are the session's; at the end the model, with its buffers, is whole on every worker."""
    expected = alone(2, 7).state_dict()
    models: dict[int, nn.Module] = {}

    def program(session: Session) -> None:
        model = models[session.rank] = made()
        replicated, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        assert replicated is model
        for epoch in range(2):
            train(model, optimizer, session.batches(images(), epoch))

    run_sessions(grid_of("2x2", PLANS[plan], verify=plan == "samples at last"), program)
    for model in models.values():
        assert type(model.get_parameter("last.weight")) is nn.Parameter
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-11)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor, target: Tensor | None = None) -> Any:
        found = self.last(torch.tanh(self.embedding(tokens))).view(-1, 11)
        return found if target is None else {"loss": cross_entropy(found, target.reshape(-1))}


@pytest.mark.parametrize("inside", [False, True])
def test_samples_and_time_in_one_dimension_and_losses_of_the_model(inside: bool) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, place: int, places: int) -> None:
        for step in range(3):
            tokens = torch.randint(11, (5, 6), generator=torch.Generator().manual_seed(step))
            mine = tokens[slice(*even_bounds(5, places, place))]
            optimizer.zero_grad()
            if inside:
                model(mine[:, :-1], target=mine[:, 1:])["loss"].backward()
            else:
                cross_entropy(model(mine[:, :-1]), mine[:, 1:].reshape(-1)).backward()
            optimizer.step()

    def program(session: Session) -> dict[str, Tensor]:
        model = made(Tokens)
        _, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.5))
        run(model, optimizer, session.column, session.columns)
        return model.state_dict()

    model = made(Tokens)
    run(model, torch.optim.SGD(model.parameters(), lr=0.5), 0, 1)
    for state in run_sessions(grid_of("2x2", verify=True), program):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-11, atol=1e-12)


def test_a_script_keeps_and_resumes_whole_states() -> None:
    """Read on all workers in the middle; given to ordinary ones before `replicate`, and loaded after it."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        inputs, target = images().tensors
        for step in range(first, last):
            optimizer.zero_grad()
            cross_entropy(model(inputs[step : step + 6]), target[step : step + 6]).backward()
            optimizer.step()

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [each]} for each in model.parameters()], lr=0.01, eps=1e-3)

    whole = made()
    optimizer = adam(whole)
    steps(whole, optimizer, 0, 3)
    kept = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    steps(whole, optimizer, 3, 6)

    def program(session: Session) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model = made()
        optimizer = adam(model)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(copy.deepcopy(kept[1]))  # which an optimizer's steps may change
        session.replicate(model, optimizer)
        steps(model, optimizer, 3, 6)
        mine = {name: tensor.clone() for name, tensor in model.state_dict().items()}, copy.deepcopy(optimizer.state_dict())
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(copy.deepcopy(kept[1]))
        steps(model, optimizer, 3, 6)
        again = model.state_dict()
        for name, tensor in mine[0].items():
            torch.testing.assert_close(again[name], tensor, rtol=1e-11, atol=1e-12)
        return mine

    for state, of_optimizer in run_sessions(grid_of(), program):
        for name, tensor in whole.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-11)
        for number, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                torch.testing.assert_close(of_optimizer["state"][number][key], value, rtol=1e-9, atol=1e-11)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


Wrong = Callable[[Session, nn.Module, torch.optim.Optimizer, Tensor, Tensor], Any]


def _evaluates_alone(session: Session, model: nn.Module, optimizer: Any, inputs: Tensor, target: Tensor) -> None:
    if session.rank == 0:
        with torch.no_grad():
            model(inputs)
    session.barrier()


def _saves_alone(session: Session, model: nn.Module, optimizer: Any, inputs: Tensor, target: Tensor) -> None:
    if session.rank == 0:
        model.state_dict()


def _looks_within(session: Session, model: nn.Module, optimizer: Any, inputs: Tensor, target: Tensor) -> None:
    kept: list[Tensor] = []
    model[1].register_forward_hook(lambda module, given, output: kept.append(output))  # type: ignore[index]
    loss = cross_entropy(model(inputs), target)
    assert kept[0].dim() == 2
    (loss + kept[0].abs().mean()).backward()


def _leaves_out_a_step(session: Session, model: nn.Module, optimizer: Any, inputs: Tensor, target: Tensor) -> None:
    loss = cross_entropy(model(inputs), target)
    if session.rank:
        loss.backward()
    optimizer.step()


REFUSED: dict[str, tuple[str, Wrong]] = {
    "evaluation on rank 0": ("worker/0 has come to the model's forward, but worker/1 to a call", _evaluates_alone),
    "state_dict on rank 0": (r"model.state_dict\(\), but worker/1 to the end", _saves_alone),
    "a step left out": (r"to optimizer.step\(\), but worker/1 to backward\(\)", _leaves_out_a_step),
    "different samples": ("called the model with different samples", lambda s, m, _, x, __: m(x[s.rank :: 2])),
    "different targets": ("have different losses", lambda s, m, _, x, y: cross_entropy(m(x), (y + s.rank) % 3).backward()),
    "a penalty": ("norm of the parameter '0.weight'", lambda s, m, *_: sum(each.norm() for each in m.parameters())),
    "an average": ("detach of the parameter '0.weight'", lambda s, m, *_: [each.detach() for each in m.parameters()]),
    "a copy": ("a copy of a model that", lambda s, m, *_: copy.deepcopy(m)),
    "an activation": ("abs of an activation within the model", _looks_within),
    "a layer alone": ("the layer '0' was called by itself", lambda s, m, _, x, __: m[0](x)),  # type: ignore[index]
    "twice differentiated": (
        "cannot be differentiated twice",
        lambda s, m, _, x, y: cross_entropy(m(x), y).backward(create_graph=True),
    ),
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("name", REFUSED)
def test_what_parts_would_make_wrong_is_refused(name: str) -> None:
    why, wrong = REFUSED[name]

    def program(session: Session) -> None:
        model = made(linear)
        _, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs, target = images().tensors
        inputs = inputs[:8, 0, 0]
        cross_entropy(model(inputs), target[:8]).backward()
        optimizer.step()
        wrong(session, model, optimizer, inputs, target[:8])

    with pytest.raises(TaskError, match=why):
        run_sessions(grid_of(), program)


def test_an_optimizer_of_the_last_layers_alone() -> None:
    """The other parameters, which need gradients and get none of their own, are not the same on all workers: each has a part."""

    def train(model: nn.Module, replicate: Callable[..., Any], rows: slice) -> Tensor:
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index]
        replicate(model, optimizer)
        inputs, target = images().tensors
        for step in range(5):
            optimizer.zero_grad()
            cross_entropy(model(inputs[step : step + 6, 0, 0][rows]), target[step : step + 6][rows]).backward()
            optimizer.step()
        return model.state_dict()["2.weight"].clone()

    def program(session: Session) -> Tensor:
        return train(made(linear), session.replicate, slice(*even_bounds(6, 2, session.column)))

    expected = train(made(linear), lambda *_: None, slice(0, 6))
    for weight in run_sessions(grid_of("2x2"), program):
        torch.testing.assert_close(weight, expected, rtol=1e-11, atol=1e-12)


#: Losses that are no means over samples, and what the error says of them.
NO_MEANS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "a sum": ("it is the sum over the samples", lambda output, target: cross_entropy(output, target, reduction="sum")),
    "class weights": (
        "it has class weights",
        lambda output, target: cross_entropy(output, target, weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)),
    ),
    "pairs": (
        "each sample's gradient depends on other samples",
        lambda output, target: (output @ output.T).square().mean(),
    ),
}


@pytest.mark.parametrize("name", NO_MEANS)
def test_where_columns_divide_samples_a_loss_must_be_their_mean(name: str) -> None:
    why, loss_of = NO_MEANS[name]

    def program(session: Session) -> None:
        model = made(linear)
        _, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs, target = images().tensors
        mine = slice(*even_bounds(8, session.columns, session.column))
        for _ in range(2):
            loss_of(model(inputs[mine, 0, 0]), target[mine]).backward()
            optimizer.step()

    run_sessions(grid_of("2x1"), program)
    with pytest.raises(TaskError, match=f"not a mean over this worker's samples: {why}"):
        run_sessions(grid_of("2x2"), program)


class Scored(nn.Module):
    """It computes its loss itself."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = linear(), loss

    def forward(self, inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
        output = self.layer(inputs)
        return {"loss": self.loss(output, target), "scores": output}


#: Losses of a model that are means over its group's samples only.
OF_A_GROUP: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    **{name: NO_MEANS[name] for name in ("class weights",)},
    "a sum": ("it is the sum over the samples|it is a sum over the samples", NO_MEANS["a sum"][1]),
    "targets left out": ("it leaves out targets", lambda output, target: cross_entropy(output, target, ignore_index=1)),
    "a mean of some": ("what it divides by", lambda output, target: cross_entropy(output[target == 2], target[target == 2])),
    "the hardest": ("it chooses", lambda output, target: cross_entropy(output, target, reduction="none").topk(3).values.mean()),
}


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_a_loss_that_the_model_computes_is_a_mean_over_the_samples_of_all_groups(name: str) -> None:
    why, loss = OF_A_GROUP[name]

    def program(session: Session) -> None:
        model = made(lambda: Scored(loss))
        _, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs, target = images().tensors
        mine = slice(8 * session.group, 8 * session.group + 8)
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs[mine, 0, 0], target[mine])["loss"].backward()
            optimizer.step()

    run_sessions(grid_of("2x1"), program)  # of one group it is that of all its samples
    with pytest.raises(TaskError, match=f"not a mean over this worker's samples: ({why})"):
        run_sessions(grid_of("2x1", compute={"groups": 2}, exchange={"kind": "allreduce"}), program)


@pytest.mark.parametrize(
    ("make", "sections", "refusal", "why"),
    [
        (torch.optim.Adafactor, {}, DifferentModelError, "the optimizer Adafactor updates parts"),
        (torch.optim.LBFGS, {}, TaskError, "LBFGS looks at all parameters together"),
        (torch.optim.SGD, {"compute": {"grid": "auto"}}, UsageError, 'grid = "auto" is for tasks'),
    ],
)
def test_what_cannot_be_divided_is_refused(make: Any, sections: dict[str, Any], refusal: Refusal, why: str) -> None:
    def program(session: Session) -> None:
        model = made(linear)
        session.replicate(model, make(model.parameters()))
        model(images().tensors[0][:8, 0, 0])

    with pytest.raises(refusal, match=why):
        run_sessions(grid_of(verify=True, **sections), program)


async def test_a_run_that_is_stopped_leaves_a_whole_model(tmp_path: Path) -> None:
    topology = grid_of(job={"elastic": False}, compute={"groups": 2}, exchange={"kind": "gossip"})
    models: dict[int, nn.Module] = {}
    begun = asyncio.Event()

    async def script(run: OwnRun, rank: int) -> int:
        async with run.context(f"worker/{rank}") as context:
            core, thread, loop = Core(context), BackgroundThread("compute"), asyncio.get_running_loop()
            try:
                session = AsyncSession(core, thread)
                model = models[rank] = made(linear)
                _, optimizer = await session.replicate(model, torch.optim.Adam(model.parameters(), lr=0.01))
                inputs, target = images().tensors

                def train() -> int:
                    while True:
                        cross_entropy(model(inputs[:4, 0, 0]), target[:4]).backward()
                        try:
                            optimizer.step()
                        except RunStopped as stop:
                            with pytest.raises(RunStopped):
                                optimizer.step()
                            return stop.step
                        optimizer.zero_grad()
                        loop.call_soon_threadsafe(begun.set)

                found = await session.run(train)
                await thread.submit(lambda: core.bridge.call(core.guard(core.finish()), "the end of the session"))
                return found
            finally:
                await core.close(thread)

    opened = open_run(topology, network=MemoryNetwork(), checkpoints=tmp_path / "checkpoints")
    async with opened as run, asyncio.TaskGroup() as tasks:
        scripts = [tasks.create_task(script(run, role.index)) for role in run.placement.roles]
        await begun.wait()
        step = await run.stop()
    assert [each.result() for each in scripts] == [step] * 4
    left = load_file(tmp_path / "model.safetensors")
    for model in models.values():
        assert all(torch.equal(left[name], tensor) for name, tensor in model.state_dict().items())


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import zmqtrain

generator = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(100, 6, generator=generator, dtype=torch.float64), torch.arange(100) % 3)
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with zmqtrain.session() as session:
    session.replicate(model, optimizer)
    for inputs, target in session.batches(data):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
torch.save(model.state_dict(), f"rank-{session.rank}.pt")
"""


def test_processes_divide_a_scripts_model(tmp_path: Path) -> None:
    """Clipped by torch's own function; the run leaves the whole model, and so does each worker's script."""
    (tmp_path / "trial.toml").write_text(
        '[job]\ntimeout = "30 s"\noversubscribe = true\n[compute]\ngroup_size = 4\ngrid = "2x2"\nbatch_size = 10\nthreads = 1\n'
        '[exchange]\nkind = "allreduce"\n'
    )
    (tmp_path / "script.py").write_text(SCRIPT)
    with Launched(tmp_path, "trial.toml", "script.py") as launched:
        assert launched.end() == 0, repr(launched)
    with zmqtrain.session() as session:  # for the order of samples only
        found: dict[str, Any] = {}
        exec(SCRIPT.partition("with zmqtrain")[0], found)
        batches = list(session.batches(found["data"], batch_size=10))
    model, optimizer = found["model"], found["optimizer"]
    for inputs, target in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    left = load_file(launched.run / "model.safetensors")
    for state in (left, *(torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(4))):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("same", [True, False])
def test_workers_of_a_group_that_have_other_models_are_refused(same: bool) -> None:
    def program(session: Session) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh() if same or session.rank else nn.ReLU(), nn.Linear(8, 3))
        session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))

    if same:
        run_sessions(grid_of(), program)
        return
    with pytest.raises(TaskError, match=r"the model of worker/. differs"):
        run_sessions(grid_of(), program)
