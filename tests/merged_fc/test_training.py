"""The fully connected layers merged on an FC server: training equals one process, and asynchronous groups never see them stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from examples import shakespeare
from tests.precision import close
from tests.train.test_worker import ADAM, SCHEDULED, alone
from tests.train.world import Recipe, Run, run, topology_of
from zmqtrain.errors import NonFiniteLossError, TaskError, UsageError
from zmqtrain.train.checkpoint.folder import Checkpoint, find_checkpoints
from zmqtrain.train.random_state import seed_everything

SYNC = {"kind": "model_server", "staleness": "sync"}


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(5, 4, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 4 * 3, 10),
        nn.ReLU(),
        nn.Linear(10, 3),
    ).to(dtype)


def data_of(samples: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 2, 9, 7, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


def recipe_of(dtype: torch.dtype = torch.float64, **fields: Any) -> Recipe:
    given = {"model": lambda: network(dtype), "train_data": data_of(96, dtype), "eval_data": data_of(23, dtype)}
    return Recipe(dtype, **given | fields)


def whole(recipe: Recipe, worker: str = "worker/0") -> torch.Tensor:
    """The ordinary model's parameters: the worker's layers, then the FC server's."""
    parts = [parameter for peer in (worker, "fc/0") for parameter in recipe.models[peer].parameters()]
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in parts])


def merged(groups: int, size: int, batch: int, *, exchange: dict[str, Any] | None = None, **sections: Any) -> Any:
    compute = {"groups": groups, "group_size": size, "batch_size": batch, **sections.pop("compute", {})}
    return topology_of(compute=compute, exchange={**SYNC, "merged_fc": True, **(exchange or {})}, **sections)


@pytest.mark.parametrize(
    ("groups", "size", "dtype", "fields"),
    [
        *((groups, size, torch.float64, ADAM) for groups in (1, 2, 4) for size in (1, 2, 3)),
        *((groups, size, torch.float32, SCHEDULED) for groups, size in ((1, 3), (2, 2), (4, 1))),
    ],
)
async def test_synchronous_groups_equal_one_process(groups: int, size: int, dtype: torch.dtype, fields: dict[str, Any]) -> None:
    recipe, batch = recipe_of(dtype, **fields), 24 // groups
    result = await run(merged(groups, size, batch, exchange={"shards": 2}, job={"steps": 4}), recipe)
    assert not result.errors, result.errors
    plain, exact = (alone(recipe_of(dtype, **fields), 4, 24, judge=judge) for judge in (False, True))
    for worker in range(groups * size):
        close(whole(recipe, f"worker/{worker}").to(dtype), plain.to(dtype), exact=exact)
    assert result.recorders["worker/0"].of("finish")[0]["replica_spread"] == 0
    assert [name for name, _ in recipe.models["worker/0"].named_parameters()] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert [name for name, _ in recipe.models["fc/0"].named_parameters()] == ["6.weight", "6.bias", "8.weight", "8.bias"]


class Detached(nn.Module):
    """Nothing in its convolution phase gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(252, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            found = torch.tanh(self.conv(x)).flatten(1)
        out: Tensor = self.fc(found)
        return out


async def test_a_convolution_phase_without_gradients_stays_as_it_is() -> None:
    recipe = recipe_of(model=lambda: Detached().double())
    result = await run(merged(2, 2, 12, job={"steps": 3}), recipe)
    assert not result.errors, result.errors
    expected = alone(recipe_of(model=lambda: Detached().double()), 3, 24)
    assert (whole(recipe) - expected).norm() <= 1e-12 * expected.norm()


async def test_merged_is_unmerged_with_its_losses_and_its_evaluation() -> None:
    values = []
    for exchange in ({}, {"merged_fc": True}, {"merged_fc": True, "split": "8"}):
        compute = {"groups": 2, "group_size": 3, "batch_size": 11, "accumulate": 2}
        recipe = recipe_of()
        result = await run(topology_of(job={"steps": 3, "eval_every": 2}, compute=compute, exchange=SYNC | exchange), recipe)
        assert not result.errors, result.errors
        losses = [sum(result.losses(f"worker/{3 * group + place}")[2] * n for place, n in enumerate((4, 4, 3))) for group in (0, 1)]
        evaluated = [
            (event["step"], event["eval_loss"], event["eval_accuracy"]) for event in result.recorders["worker/0"].of("eval")
        ]
        values.append((losses, evaluated))
    for other in values[1:]:
        assert other[0] == pytest.approx(values[0][0], rel=1e-10)
        assert other[1] == [pytest.approx(each, rel=1e-10) for each in values[0][1]]


async def test_several_parameter_groups_one_of_them_empty_on_either_side() -> None:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [
                {"params": parameters[:4], "lr": 0.02},
                {"params": [parameters[4], parameters[6]], "weight_decay": 0.1},
                {"params": [parameters[5], parameters[7]], "momentum": 0.0},
            ],
            lr=0.1,
            momentum=0.9,
        )

    recipe = recipe_of(optimizer=optimizer, **SCHEDULED)
    result = await run(merged(2, 2, 12, job={"steps": 4}), recipe)
    assert not result.errors, result.errors
    expected = alone(recipe_of(optimizer=optimizer, **SCHEDULED), 4, 24)
    assert (whole(recipe) - expected).norm() <= 1e-12 * expected.norm()


def kept(folder: Path, step: int) -> torch.Tensor:
    """The ordinary model of a checkpoint."""
    model = Checkpoint(folder / f"step-{step:08d}").part("model")[0]
    return torch.cat([payload.tensor.reshape(-1).double() for payload in model.values()])


@pytest.mark.parametrize(
    ("servers", "groups", "size", "dtype", "fields"),
    [(2, 1, 1, torch.float64, ADAM), (3, 2, 2, torch.float64, SCHEDULED), (2, 2, 2, torch.float32, SCHEDULED)],
)
async def test_fc_servers_that_divide_the_layers_equal_one_process(
    servers: int, groups: int, size: int, dtype: torch.dtype, fields: dict[str, Any], tmp_path: Path
) -> None:
    """So does one FC server that goes on from their checkpoint, and several that go on from its."""

    async def train(servers: int, steps: int, folder: Path, resume: Path | None = None) -> Run:
        job = {"steps": steps, "eval_every": 2, "checkpoint_every": 2}
        topology = merged(groups, size, 24 // groups, exchange={"fc_servers": servers}, job=job)
        result = await run(topology, recipe_of(dtype, **fields), folder=folder, resume=resume)
        assert not result.errors, result.errors
        return result

    plain, exact = (alone(recipe_of(dtype, **fields), 4, 24, judge=judge) for judge in (False, True))
    several, one = await train(servers, 4, tmp_path / "several"), await train(1, 4, tmp_path / "one")
    await train(1, 4, tmp_path / "then one", tmp_path / "several" / "step-00000002")
    await train(servers, 4, tmp_path / "then several", tmp_path / "one" / "step-00000002")
    for each in ("several", "one", "then one", "then several"):
        close(kept(tmp_path / each, 4).to(dtype), plain.to(dtype), each, exact=exact)
    assert list(Checkpoint(tmp_path / "several" / "step-00000004").part("model")[0]) == list(network().state_dict())
    rounding = 100 * torch.finfo(dtype).eps
    assert several.losses("worker/0") == pytest.approx(one.losses("worker/0"), rel=rounding)
    for mine, its in zip(several.recorders["worker/0"].of("eval"), one.recorders["worker/0"].of("eval"), strict=True):
        assert mine["eval_loss"] == pytest.approx(its["eval_loss"], rel=rounding)
    assert several.recorders["fc/0"].of("fc")[0]["updates"] == 4
    assert not several.recorders["fc/1"].of("fc")


async def test_dropout_and_batch_norm_do_not_depend_on_the_number_of_fc_servers(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        fc = [nn.Linear(105, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.ReLU(), nn.Linear(9, 3)]
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), *fc).double()

    found = []
    for servers in (2, 3):
        job = {"steps": 3, "checkpoint_every": 3}
        topology = merged(1, 2, 12, exchange={"fc_servers": servers}, job=job, compute={"accumulate": 2})
        result = await run(topology, recipe_of(model=model), folder=tmp_path / str(servers))
        assert not result.errors, result.errors
        found.append(kept(tmp_path / str(servers), 3))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


async def test_the_output_projection_of_a_recurrent_model_is_divided(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    passages = TensorDataset(*(torch.randint(11, (48, 5), generator=generator) for _ in range(2)))

    def model() -> nn.Module:
        torch.manual_seed(3)
        return shakespeare.Lstm(11, 8).double()

    def recipe() -> Recipe:
        return recipe_of(model=model, loss=shakespeare.loss, train_data=passages, eval_data=None)

    topology = merged(2, 1, 12, exchange={"fc_servers": 2}, job={"steps": 3, "checkpoint_every": 3})
    result = await run(topology, recipe(), folder=tmp_path)
    assert not result.errors, result.errors
    expected = alone(recipe(), 3, 24)
    assert (kept(tmp_path, 3) - expected).norm() <= 1e-10 * expected.norm()


async def test_a_phase_that_trains_in_other_steps_than_it_evaluates_is_divided_as_well(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.one, self.two = nn.Conv2d(2, 2, 3).double(), nn.Linear(70, 3).double(), nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.one(self.conv(x).flatten(1))
            return self.two(y) if self.training else y

    found = []
    for servers in (1, 2):
        topology = merged(1, 1, 8, exchange={"fc_servers": servers}, job={"steps": 2, "checkpoint_every": 2})
        result = await run(topology, recipe_of(model=Two), folder=tmp_path / str(servers))
        assert not result.errors, result.errors
        found.append(kept(tmp_path / str(servers), 2))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


async def test_groups_that_share_slots_equal_one_process() -> None:
    recipe = recipe_of()
    topology = merged(4, 2, 6, compute={"pipeline": 2, "accumulate": 2}, job={"steps": 4})
    result = await run(topology, recipe)
    assert not result.errors, result.errors
    expected = alone(recipe_of(), 4, 24)
    assert (whole(recipe, "worker/7") - expected).norm() <= 1e-12 * expected.norm()
    assert ("wait for the slot", "wait") in result.recorders["worker/3"].spans


def staleness(result: Run) -> tuple[float, float]:
    """The mean staleness of the FC server, and of the model servers."""
    (fc,) = result.recorders["fc/0"].of("fc")
    (server,) = result.recorders["server/0"].of("server")
    return fc["staleness_mean"], server["staleness_mean"]


def loss_of(model: nn.Module, data: TensorDataset) -> float:
    inputs, targets = data.tensors
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs), targets))


@pytest.mark.parametrize("policy", ["async", {"bound": 2}])
async def test_asynchronous_groups_learn_and_their_fully_connected_layers_are_never_stale(policy: Any) -> None:
    """What they have learnt is judged on all samples: at which steps of the others a group makes its own the machine decides."""
    recipe = recipe_of(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), eval_data=data_of(96))
    result = await run(merged(3, 1, 8, exchange={"staleness": policy}, job={"steps": 48, "eval_every": 24}), recipe)
    assert not result.errors, result.errors
    (fc,) = result.recorders["fc/0"].of("fc")
    assert (fc["updates"], fc["staleness"], fc["samples"]) == (144, {"0": 144}, 1152)
    evaluations = result.recorders["worker/0"].of("eval")
    assert [event["step"] for event in evaluations] == [24, 48]
    seed_everything(1)
    assert evaluations[-1]["eval_loss"] < loss_of(network(), data_of(96)) - 0.01


@pytest.mark.parametrize("fields", [SCHEDULED, ADAM], ids=["sgd-schedule", "adam"])
async def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(fields: dict[str, Any], tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(105, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()

    # With several groups the running statistics would depend on who comes first.
    topology = merged(1, 2, 12, job={"steps": 7, "checkpoint_every": 3, "keep_checkpoints": 3})
    first, again = recipe_of(model=model, **fields), recipe_of(model=model, **fields)
    straight = await run(topology, first, folder=tmp_path)
    assert not straight.errors, straight.errors
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000003", "step-00000006", "step-00000007"]
    kept = Checkpoint(tmp_path / "step-00000006").part("model")[0]
    assert list(kept) == list(model().state_dict()), "an ordinary state dict"
    resumed = await run(topology, again, folder=tmp_path / "again", resume=tmp_path / "step-00000003")
    assert not resumed.errors, resumed.errors
    assert torch.equal(whole(first), whole(again))
    for worker in range(2):
        assert straight.losses(f"worker/{worker}")[3:] == resumed.losses(f"worker/{worker}")
    for name, value in first.models["fc/0"].state_dict().items():
        assert torch.equal(value, again.models["fc/0"].state_dict()[name]), name


async def test_a_checkpoint_of_an_unmerged_run_does_not_fit(tmp_path: Path) -> None:
    topology = topology_of(job={"steps": 2, "checkpoint_every": 2}, compute={"batch_size": 8}, exchange=SYNC)
    assert not (await run(topology, recipe_of(), folder=tmp_path)).errors
    with pytest.raises(Exception, match=r"was written with \[exchange\] merged_fc"):
        await run(merged(1, 1, 8, job={"steps": 4}), recipe_of(), resume=tmp_path)


def spoiled(call: int) -> Any:
    """A loss that is NaN at one of the FC server's calls."""

    def make(peer: str) -> Any:
        recipe = recipe_of()
        calls = 0

        def loss(output: Tensor, target: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            value = nn.functional.cross_entropy(output, target)
            return value * float("nan") if peer == "fc/0" and calls == call else value

        recipe.fields["loss"] = loss
        return recipe(peer)

    return make


@pytest.mark.parametrize("policy", ["sync", "async"])
async def test_a_bad_loss_stops_the_run_and_keeps_the_last_good_step(policy: str, tmp_path: Path) -> None:
    topology = merged(2, 2, 12, exchange={"staleness": policy}, job={"steps": 10})
    result = await run(topology, spoiled(7), folder=tmp_path)
    raised = {peer: error for peer, error in result.errors.items() if isinstance(error, NonFiniteLossError)}
    assert len(raised) == 2, result.errors
    steps = {error.step for error in raised.values()}
    assert len(steps) == 1
    (step,) = steps
    kept = Checkpoint(tmp_path / f"step-{step:08d}").part("model")[0]
    assert len(kept) == 8
    if policy == "sync":
        assert step == 3
        good = recipe_of()
        assert not (await run(merged(2, 2, 12, job={"steps": 3}), good, folder=tmp_path)).errors
        assert torch.equal(torch.cat([payload.tensor.reshape(-1) for payload in kept.values()]), whole(good))


async def test_a_bad_loss_may_be_passed_over() -> None:
    result = await run(merged(1, 2, 12, job={"steps": 5, "on_nan": "continue"}), spoiled(3))
    assert not result.errors, result.errors
    assert len(result.losses("worker/1")) == 5


async def test_targets_may_be_more_than_a_tensor() -> None:
    def collate(samples: list[Any]) -> Any:
        inputs, classes = zip(*samples, strict=True)
        return torch.stack(inputs), {"class": torch.stack(classes), "weights": (torch.ones(len(inputs)),)}

    def loss(output: Tensor, target: dict[str, Any]) -> Tensor:
        each = nn.functional.cross_entropy(output, target["class"], reduction="none")
        return (each * target["weights"][0]).mean()

    plain, fancy = recipe_of(eval_data=None), recipe_of(eval_data=None, collate=collate, loss=loss)
    for recipe in (plain, fancy):
        result = await run(merged(1, 2, 12, job={"steps": 3}), recipe)
        assert not result.errors, result.errors
    torch.testing.assert_close(whole(fancy), whole(plain), rtol=1e-12, atol=1e-12)


class Sizes(nn.Module):
    """Passes something that is not a sample's to the second phase."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 2, 3).double(), nn.Linear(70, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        out: Tensor = self.fc(y.flatten(1)) * y.size(0)
        return out


@pytest.mark.parametrize(
    ("fields", "exchange", "error", "said"),
    [
        ({"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(126, 3)).double()}, {}, UsageError, "no convolutions"),
        ({}, {"split": "classifier"}, UsageError, "calls no such module"),
        ({"model": Sizes}, {}, UsageError, "a value that is an int"),
        ({"loss": lambda output, target: 1 / 0}, {}, TaskError, "Task.loss.*ZeroDivisionError"),
        ({"loss": lambda output, target: output}, {}, TaskError, "tensor of one element"),
        (
            {"collate": lambda samples: (torch.stack([each for each, _ in samples]), "classes"), "eval_data": None},
            {},
            TaskError,
            "a target of the task's data contains a str",
        ),
    ],
)
async def test_what_is_wrong_with_a_task_is_said(
    fields: dict[str, Any], exchange: dict[str, Any], error: type[Exception], said: str
) -> None:
    result = await run(merged(1, 2, 12, exchange=exchange, job={"steps": 2}), recipe_of(**fields))
    first = [each for each in result.errors.values() if not getattr(each, "consequence", False)]
    assert first, result.errors
    with pytest.raises(error, match=said):
        raise first[0]


async def test_a_schedule_of_its_own_reaches_each_groups_update() -> None:
    """Asynchronous groups are at different steps; the FC server takes the learning rate of the group whose turn it is."""
    recipe = recipe_of(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: float(step < 2)),
    )
    result = await run(merged(2, 1, 8, exchange={"staleness": "async"}, job={"steps": 5, "checkpoint_every": 0}), recipe)
    assert not result.errors, result.errors
    assert result.recorders["fc/0"].of("fc")[0]["updates"] == 10


class Head(nn.Module):
    """The gradient of one of its layers is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4 * 4 * 3, 3), nn.Linear(4 * 4 * 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.used(x) + self.unused(x).detach()
        return output


@pytest.mark.parametrize(("groups", "accumulate"), [(1, 2), (2, 1)])
async def test_what_no_backward_reaches_is_passed_over(groups: int, accumulate: int) -> None:
    """As PyTorch does it: no weight decay, no momentum, no step counted."""

    def recipe() -> Recipe:
        return recipe_of(
            model=lambda: nn.Sequential(*list(network())[:6], Head().double()),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5),
        )

    ours, compute = recipe(), {"accumulate": accumulate}
    result = await run(merged(groups, 1, 24 // groups, job={"steps": 4}, exchange={"split": "6"}, compute=compute), ours)
    assert not result.errors, result.errors
    assert any("unused" in name for name, _ in ours.models["fc/0"].named_parameters())
    expected = alone(recipe(), 4, 24)
    assert (whole(ours) - expected).norm() <= 1e-12 * expected.norm()


async def test_losses_that_are_no_mean_over_samples_are_refused_for_groups_in_step() -> None:
    classes = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64)
    losses = (
        nn.CrossEntropyLoss(weight=classes),
        lambda output, target: nn.functional.cross_entropy(output, target, weight=classes),
    )
    for loss, said in zip(losses, ("has class weights", "is not a mean over samples"), strict=True):
        result = await run(merged(2, 1, 12, job={"steps": 2}), recipe_of(loss=loss))
        assert said in str(list(result.errors.values()))
        assert not (await run(merged(1, 1, 12, job={"steps": 2}), recipe_of(loss=loss))).errors


class Smoothed(nn.CrossEntropyLoss):
    """Another loss."""


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.2)}, "the optimizer of"),
        ({"model": lambda: nn.Sequential(*list(network())[:-2], nn.Tanh(), nn.Linear(10, 3).double())}, "the model of"),
        ({"loss": Smoothed()}, "the loss of"),
    ],
)
async def test_an_fc_server_whose_task_is_another_is_refused(fields: dict[str, Any], what: str) -> None:
    """It has the last layers and their optimizer, and the loss."""
    workers, server = recipe_of(), recipe_of(**fields)
    result = await run(merged(1, 2, 12, job={"steps": 2}), lambda peer: (server if peer == "fc/0" else workers)(peer))
    errors = [error for error in result.errors.values() if isinstance(error, TaskError)]
    assert errors, result.errors
    assert str(errors[0]).startswith(what)
