"""What a run leaves is the model that its evaluations have judged: loaded in plain PyTorch it gives the same figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.pairwise import pairwise
from tests.train.world import Recipe, Run, run, topology_of
from zmqtrain.train.checkpoint.folder import Checkpoint, find_checkpoints
from zmqtrain.train.checkpoint.model_file import model_lines
from zmqtrain.train.checkpoint.weights import Weights

#: Of each exchange with its ways to be late: what the run's model is called.
MEAN, CENTER = "the mean of all groups' parameters", "the center of elastic averaging"
SERVERS, ALL = "the model servers' parameters", "the parameters that all workers have"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "allreduce": ({"kind": "allreduce"}, ALL),
    "allreduce every 2": ({"kind": "allreduce", "every": 2}, ALL),
    "sync": ({"kind": "model_server", "staleness": "sync", "shards": 2, "split_size": 512}, SERVERS),
    "bound 0": ({"kind": "model_server", "staleness": {"bound": 0}}, SERVERS),
    "bound 2": ({"kind": "model_server", "staleness": {"bound": 2}, "shards": 2, "split_size": 512}, SERVERS),
    "async": ({"kind": "model_server", "staleness": "async"}, SERVERS),
    "async, 3 shards": ({"kind": "model_server", "staleness": "async", "shards": 3, "split_size": 256}, SERVERS),
    "async, snapshots": ({"kind": "model_server", "staleness": "async", "snapshot": True, "shards": 2, "split_size": 512}, SERVERS),
    "averaging": ({"kind": "averaging"}, ALL),
    "averaging every 3": ({"kind": "averaging", "every": 3}, MEAN),
    "averaging late": ({"kind": "averaging", "every": 4, "averaging": {"overlap_steps": 1, "fragments": 2}}, MEAN),
    "averaging rounded": ({"kind": "averaging", "every": 2, "averaging": {"method": "outer", "deltas": "fp16"}}, MEAN),
    "elastic": ({"kind": "averaging", "every": 2, "averaging": {"method": "elastic"}}, CENTER),
    "outer": ({"kind": "averaging", "every": 3, "averaging": {"method": "outer"}}, MEAN),
    "gossip": ({"kind": "gossip", "gossip": {"average_evaluations": True}}, MEAN),
    "gossip of gradients": ({"kind": "gossip", "gossip": {"exchange": "gradients", "average_evaluations": True}}, MEAN),
}
#: Those that run with groups of two workers as well: one of each kind.
OF_TWO = ("allreduce", "sync", "async, 3 shards", "averaging every 3", "outer", "gossip")
APART = ("bound 0", "bound 2", "async", "async, 3 shards", "async, snapshots")


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Flatten(), nn.Linear(4 * 4 * 3, 10), nn.Tanh(), nn.Linear(10, 3),
    ).to(dtype)  # fmt: skip


def data_of(samples: int, seed: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 2, 9, 7, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


EVAL = data_of(31, 6)


def plain_loss(file: Path, model: nn.Module | None = None) -> float:
    """The evaluation, by somebody who has the model's code and PyTorch."""
    model = network() if model is None else model
    model.load_state_dict(load_file(file))
    model.eval()
    inputs, target = EVAL.tensors
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs), target))


def slow_group(peers: tuple[str, ...], seconds: float = 0.004, *, others: float = 0.0, **fields: Any) -> Callable[[str], Any]:
    """A recipe with which these workers take longer than the others."""

    def make(peer: str) -> Any:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            time.sleep(seconds if peer in peers else others)
            return nn.functional.cross_entropy(output, target)

        given = {"model": network, "train_data": data_of(96, 5), "eval_data": EVAL, "loss": loss, **fields}
        return Recipe(**given)(peer)

    return make


def topology(
    exchange: dict[str, Any], optimizer: dict[str, Any] | None = None, *, groups: int = 3, size: int = 1, **job: Any
) -> Any:
    return topology_of(
        job={"steps": 9, "elastic": False, "eval_every": 4, "checkpoint_every": 4, "keep_checkpoints": 9, **job},
        compute={"groups": groups, "group_size": size, "batch_size": 4 * size, "bucket_size": 1200},  # four buckets
        exchange=exchange,
        optimizer=optimizer or {},
    )


def evaluations(result: Run) -> dict[int, float]:
    return {event["step"]: event["eval_loss"] for event in result.recorders["worker/0"].of("eval")}


_WHOLE: dict[tuple[str, int], tuple[Run, Path]] = {}


async def whole_run(case: str, size: int, folders: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run of 9 steps whose last group is slower than the others, and its folder: the same for all tests, which only read it."""
    if (case, size) not in _WHOLE:
        folder = folders.mktemp("run")
        late = tuple(f"worker/{rank}" for rank in range(2 * size, 3 * size))
        result = await run(topology(CASES[case][0], size=size), slow_group(late), folder=folder)
        assert not result.errors, result.errors
        _WHOLE[case, size] = result, folder
    return _WHOLE[case, size]


@pytest.mark.parametrize(("case", "size"), [*((case, 1) for case in CASES), *((case, 2) for case in OF_TWO)])
async def test_the_model_on_disk_is_the_one_that_was_judged(case: str, size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """At the end, and in each checkpoint on the way; also where one group is slower than the others."""
    exchange, called = CASES[case]
    result, tmp_path = await whole_run(case, size, tmp_path_factory)
    judged = evaluations(result)
    assert sorted(judged) == [4, 8, 9]
    assert plain_loss(tmp_path / "model.safetensors") == pytest.approx(judged[9], rel=1e-6)
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["model"] == called
    counted = 8 if case == "allreduce every 2" else 9  # the gradients of the last step are not exchanged
    assert (about["step"], about["samples"]) == (9, counted * 3 * 4 * size)
    assert about["metrics"]["eval_loss"] == judged[9]
    assert about["versions"]["torch"] == torch.__version__
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000004", "step-00000008", "step-00000009"]
    assert (tmp_path / "step-00000009" / "model.safetensors").samefile(tmp_path / "model.safetensors")
    for step in (4, 8, 9):
        kept = tmp_path / f"step-{step:08d}"
        if case not in APART or step == 9:
            assert plain_loss(kept / "model.safetensors") == pytest.approx(judged[step], rel=1e-6)
        if exchange["kind"] == "model_server":
            assert parameters(kept) == held(kept), "the model is what its checkpoint's servers go on from"


def parameters(checkpoint: Path) -> list[float]:
    """All values of a model's parameters, in order of size."""
    model = load_file(checkpoint / "model.safetensors")
    names = [name for name, _ in network().named_parameters()]
    return sorted(torch.cat([model[name].reshape(-1) for name in names]).tolist())


def held(checkpoint: Path) -> list[float]:
    """All values of what the servers keep, in order of size."""
    pieces = [
        tensor
        for file in checkpoint.glob("server-*.safetensors")
        for name, tensor in load_file(file).items()
        if name.endswith("values")
    ]
    return sorted(torch.cat([piece.reshape(-1) for piece in pieces]).tolist())


@pytest.mark.parametrize("case", ["async", "bound 2", "async, 3 shards"])
async def test_evaluations_on_the_way_judge_what_each_server_has_at_one_moment(case: str, tmp_path: Path) -> None:
    """Groups 1 and 2 push all the time. What was shown for an evaluation has, of all pieces of a server, versions that this server
    had at one time; and group 0's steps so far are in it."""
    result = await run(topology(CASES[case][0], steps=24, checkpoint_every=0), slow_group(("worker/0",)), folder=tmp_path)
    assert not result.errors, result.errors
    shown: dict[str, dict[int, int]] = {}
    for event in result.recorders["worker/0"].audited:
        if event["what"] == "shown":
            shown.setdefault(event["label"], {})[event["piece"]] = event["version"]
    assert len(shown) == 6  # 5 evaluations, and the last one
    servers = [recorder for peer, recorder in result.recorders.items() if peer.startswith("server")]
    for label, versions in shown.items():
        seen = 0
        for server in servers:
            moments = list(history(server.audited))
            pieces = {piece: version for piece, version in versions.items() if piece in moments[-1]}
            assert any(all(moment.get(piece, 0) == version for piece, version in pieces.items()) for moment in moments), label
            seen += len(pieces)
        assert seen == len(versions)
        step = 24 if label == "last" else int(label.removeprefix("evaluate "))
        assert all(version >= (3 * step if label == "last" else step) for version in versions.values())


def history(audited: list[dict[str, Any]]) -> Iterator[dict[int, int]]:
    """The versions of all pieces of a server after each of its updates."""
    now: dict[int, int] = {}
    yield dict(now)
    for event in audited:
        if event["what"] == "applied":
            now[event["piece"]] = event["version"]
            yield dict(now)


class Slope(nn.Module):
    """A loss that is linear in its parameters: whatever the order of steps, their sum is known."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(7, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :5] @ self.first + inputs[:, 5:] @ self.second


@pairwise(
    {
        "late": {"none": (), "the last": ("worker/3",), "the first": ("worker/0",)},
        "exchange": {"1": CASES["async"][0], "3": CASES["async, 3 shards"][0], "bound": CASES["bound 2"][0]},
        "look_ahead": ["none", "auto"],
    }
)
async def test_all_steps_of_all_groups_are_in_the_model(
    exchange: dict[str, Any], late: tuple[str, ...], look_ahead: str, tmp_path: Path
) -> None:
    """As their sum, or with a learning rate that is as many times lower as there are groups."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randint(-8, 9, (160, 12), generator=generator).double()
    data = TensorDataset(inputs, torch.zeros(160))
    groups, steps, lr = 4, 10, 0.5

    def make(peer: str) -> Any:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            if peer in late:
                time.sleep(0.01)
            return output.mean()

        fields = {"train_data": data, "eval_data": data, "model": Slope, "loss": loss}
        return Recipe(**fields, optimizer=lambda p: torch.optim.SGD(p, lr=lr))(peer)

    shape = topology(exchange, {"look_ahead": look_ahead}, groups=groups, steps=steps, eval_every=0, checkpoint_every=0)
    result = await run(shape, make, folder=tmp_path)
    assert not result.errors, result.errors
    # One epoch: each sample once, in batches of 4; the optimizer of each group makes steps of its own.
    expected = -lr * inputs.sum(0) / 4 / (groups if look_ahead == "auto" else 1)
    model = load_file(tmp_path / "model.safetensors")
    assert torch.equal(torch.cat([model["first"], model["second"]]), expected)
    assert evaluations(result)[steps] == float((inputs @ expected).mean())
    assert not find_checkpoints(tmp_path), "no checkpoints were asked for"


#: Without those that keep what another one does.
GOES_ON = [case for case in CASES if case not in ("bound 0", "async", "averaging", "gossip of gradients")]


@pytest.mark.parametrize("case", GOES_ON)
async def test_a_run_goes_on_from_its_end(case: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With the same bits as one that was not interrupted, where that is determined."""
    exchange, _ = CASES[case]
    first = await run(topology(exchange, steps=5), slow_group(()), folder=tmp_path / "first")
    second = await run(topology(exchange), slow_group(()), folder=tmp_path / "second", resume=tmp_path / "first")
    assert not {**first.errors, **second.errors}
    assert len(second.losses("worker/1")) == 4
    assert json.loads((tmp_path / "second" / "model.json").read_text())["step"] == 9
    if case in APART or case == "allreduce every 2":  # of the latter, gradients that were added up are left out so far
        return
    straight, folder = await whole_run(case, 1, tmp_path_factory)
    assert straight.losses("worker/1")[5:] == second.losses("worker/1")
    one, other = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "second"))
    assert all(torch.equal(one[name], other[name]) for name in one)


async def test_names_are_those_of_a_model_that_is_not_compiled(tmp_path: Path) -> None:
    def compiled() -> nn.Module:
        """With the names that `torch.compile` gives."""
        model = nn.Module()
        model._orig_mod = network()
        model.forward = model._orig_mod.forward
        return model

    result = await run(topology(CASES["sync"][0], steps=2), slow_group((), model=compiled), folder=tmp_path)
    assert not result.errors, result.errors
    assert plain_loss(tmp_path / "model.safetensors") == pytest.approx(evaluations(result)[2], rel=1e-6)
    assert load_file(tmp_path / "model.safetensors").keys() == network().state_dict().keys()
    again = await run(topology(CASES["allreduce"][0], steps=4), slow_group((), model=compiled), folder=tmp_path / "again")
    more = await run(
        topology(CASES["allreduce"][0], steps=6),
        slow_group((), model=compiled),
        folder=tmp_path / "more",
        resume=tmp_path / "again",
    )
    assert not {**again.errors, **more.errors}


@pytest.mark.parametrize("given", ["run", "file", "checkpoint", "checkpoints", "compiled"])
async def test_weights_are_taken_from_a_run_its_model_or_a_checkpoint(given: str, tmp_path: Path) -> None:
    first = await run(topology(CASES["async"][0]), slow_group(()), folder=tmp_path / "run" / "checkpoints")
    assert not first.errors
    for name in ("model.safetensors", "model.json"):
        (tmp_path / "run" / "checkpoints" / name).rename(tmp_path / "run" / name)
    model = tmp_path / "run" / "model.safetensors"
    paths = {
        "run": tmp_path / "run",
        "file": model,
        "checkpoint": tmp_path / "run" / "checkpoints" / "step-00000009",
        "checkpoints": tmp_path / "run" / "checkpoints",
        "compiled": tmp_path / "theirs.safetensors",
    }
    if given == "compiled":
        from safetensors.torch import save_file

        save_file({f"_orig_mod.{name}": tensor for name, tensor in load_file(model).items()}, paths[given])
    assert Weights.of(paths[given]).step == (9 if given not in ("file", "compiled") else 0)
    second = await run(
        topology(CASES["allreduce"][0], steps=1, weights=str(paths[given])),
        slow_group((), optimizer=lambda p: torch.optim.SGD(p, lr=0.0)),
        folder=tmp_path / "second",
    )
    assert not second.errors, second.errors
    ours, theirs = load_file(tmp_path / "second" / "model.safetensors"), load_file(model)
    assert all(torch.equal(ours[name], theirs[name]) for name, _ in network().named_parameters())


async def test_a_checkpoint_by_time_is_at_a_step_that_is_the_same_for_all(tmp_path: Path) -> None:
    """Asynchronous groups, of which one is behind; the step is one that nobody had passed."""
    for case in ("async", "allreduce", "gossip"):
        folder = tmp_path / case
        shape = topology(CASES[case][0], steps=30, eval_every=0, checkpoint_every="0.1 s", keep_checkpoints=100)
        result = await run(shape, slow_group(("worker/2",), 0.02, others=0.01), folder=folder)
        assert not result.errors, result.errors
        found = [int(path.name.removeprefix("step-")) for path in find_checkpoints(folder)]
        assert len(found) > 1
        assert found[-1] == 30
        for peer in ("worker/0", "worker/1", "worker/2"):
            assert [event["step"] for event in result.recorders[peer].of("checkpoint")] == found
        assert Checkpoint(folder / f"step-{found[0]:08d}").step == found[0]


async def test_a_run_that_ends_between_checkpoints_keeps_its_last_model(tmp_path: Path) -> None:
    shape = topology(CASES["allreduce"][0], steps=22, eval_every=0, checkpoint_every=5, keep_checkpoints=2)
    result = await run(shape, slow_group(()), folder=tmp_path)
    assert not result.errors
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000020", "step-00000022"]
    assert plain_loss(tmp_path / "model.safetensors") == pytest.approx(evaluations(result)[22], rel=1e-6)


@pytest.mark.parametrize(
    ("grid", "case"),
    [("2x1", "allreduce"), ("2x1", "async"), ("1x2", "sync"), ("1x2", "averaging every 3"), ("2x2", "sync"), ("2x2", "allreduce")],
)
async def test_groups_that_divide_their_model_leave_the_whole_of_it(grid: str, case: str, tmp_path: Path) -> None:
    size = {"2x1": 2, "1x2": 2, "2x2": 4}[grid]
    shape = topology_of(
        job={"steps": 5, "eval_every": 2, "checkpoint_every": 2, "keep_checkpoints": 9},
        compute={"groups": 2, "group_size": size, "batch_size": 8, "grid": grid},
        exchange=CASES[case][0],
    )
    result = await run(shape, slow_group(tuple(f"worker/{rank}" for rank in range(size, 2 * size))), folder=tmp_path)
    assert not result.errors, result.errors
    judged = evaluations(result)
    assert plain_loss(tmp_path / "model.safetensors") == pytest.approx(judged[5], rel=1e-6)
    if case not in APART:
        assert plain_loss(tmp_path / "step-00000004" / "model.safetensors") == pytest.approx(judged[4], rel=1e-6)


@pytest.mark.parametrize(("case", "servers"), [("sync", 1), ("sync", 2), ("async", 2), ("bound 2", 1), ("async, snapshots", 2)])
async def test_with_merged_layers_both_phases_are_in_the_model(case: str, servers: int, tmp_path: Path) -> None:
    shape = topology_of(
        job={"steps": 5, "eval_every": 4, "checkpoint_every": 3, "keep_checkpoints": 9},
        compute={"groups": 3, "group_size": 2, "batch_size": 4},
        exchange={**CASES[case][0], "merged_fc": True, "fc_servers": servers},
    )
    result = await run(shape, slow_group(("worker/4", "worker/5")), folder=tmp_path)
    assert not result.errors, result.errors
    assert plain_loss(tmp_path / "model.safetensors") == pytest.approx(evaluations(result)[5], rel=1e-6)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000003", "step-00000005"]
    for step in (3, 5):
        kept = tmp_path / f"step-{step:08d}"
        model, theirs = load_file(kept / "model.safetensors"), load_file(kept / "fc-0.safetensors")
        own = {name.removeprefix("state/"): tensor for name, tensor in theirs.items() if name.startswith("state/")}
        assert own
        assert all(torch.equal(model[name], tensor) for name, tensor in own.items())


async def test_an_evaluation_on_the_way_judges_one_version_of_merged_layers(tmp_path: Path) -> None:
    """Others train all the time, but not while it takes place: the server's updates before it are the same for all its batches."""
    shape = topology_of(
        job={"steps": 12, "eval_every": 3, "checkpoint_every": 0},
        compute={"groups": 3, "group_size": 1, "batch_size": 4},
        exchange={**CASES["async"][0], "merged_fc": True},
    )
    result = await run(shape, slow_group(("worker/0",), eval_data=data_of(64, 6)), folder=tmp_path)
    assert not result.errors, result.errors
    spans = result.recorders["fc/0"].spans
    names = [name.split()[0] for name, _ in spans]
    runs = [index for index, name in enumerate(names) if name == "evaluation" and (index == 0 or names[index - 1] != "evaluation")]
    assert len(runs) == 4, "each evaluation is one row of turns, and nobody's step is between them"


@pytest.mark.parametrize(
    ("steps", "said"),
    [(4, "the model after step 4 ("), (0, "the model after step 4 ("), (9, "after step 4 of 9, from the last checkpoint")],
)
def test_the_last_lines_say_of_which_step_the_model_is(tmp_path: Path, steps: int, said: str) -> None:
    """Also where less is known of the run than the model shows: of one that has failed, or had nothing left to do."""
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model.json").write_text('{"step": 4, "model": "the mean"}')
    assert said in model_lines(tmp_path, steps)[0]


#: Whose loss is bad: by turns the worker that writes the model, and another one; by turns both.
BAD = [
    (case, rank)
    for number, case in enumerate([*APART, "allreduce", "sync", "averaging every 3", "elastic", "gossip"])
    for rank in ((0, 2) if number % 4 == 3 else (2 * (number % 2),))
]


@pytest.mark.parametrize(("case", "rank"), BAD)
async def test_a_bad_loss_leaves_the_model_of_the_last_good_step(case: str, rank: int, tmp_path: Path) -> None:
    def make(peer: str) -> Any:
        calls = 0

        def loss(output: Tensor, target: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            value = nn.functional.cross_entropy(output, target)
            return value * float("nan") if peer == f"worker/{rank}" and calls == 11 else value

        return slow_group((), loss=loss)(peer)

    result = await run(topology(CASES[case][0], steps=30, eval_every=0, checkpoint_every=4), make, folder=tmp_path)
    assert list(result.errors) == [f"worker/{rank}"]
    about = json.loads((tmp_path / "model.json").read_text())
    assert (about["step"], about["metrics"]) == (10, {})
    kept = tmp_path / "step-00000010"
    assert (kept / "model.safetensors").samefile(tmp_path / "model.safetensors")
    assert plain_loss(tmp_path / "model.safetensors") < 3
    if CASES[case][0]["kind"] == "model_server":
        assert parameters(kept) == held(kept)
