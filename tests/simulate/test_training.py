"""Torch in simulated time: the same arithmetic as one process, in the time that the profile gives."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.pairwise import pairwise
from zmqtrain import Task
from zmqtrain.run.faults import kill, pause
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.schema import Topology
from zmqtrain.train.random_state import seed_everything

SAMPLES, FEATURES, STEPS, BATCH = 256, 12, 6, 32
#: Samples that are evaluated: a few batches of each worker.
EVALUATED = 60
#: Per layer: name, parameters, forward and backward seconds of a worker's batch, whatever its size.
LAYERS = (("0", 12 * 16 + 16, 0.010, 0.020), ("2", 16 * 8 + 8, 0.005, 0.010), ("4", 8 * 3 + 3, 0.001, 0.002))
STEP_S = sum(forward_s + backward_s for _, _, forward_s, backward_s in LAYERS)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Recipe:
    """A task whose models can be looked at afterwards."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
        self.y = torch.randint(3, (SAMPLES,), generator=generator)
        self.models: list[nn.Module] = []

    def task(self, **fields: Any) -> Task:
        data, few = TensorDataset(self.x, self.y), TensorDataset(self.x[:EVALUATED], self.y[:EVALUATED])
        given = {"train_data": data, "eval_data": few} | fields
        return Task(model=self._model, loss=nn.functional.cross_entropy, optimizer=self._optimizer, **given)

    def alone(self) -> nn.Module:
        """One process on the whole batches."""
        seed_everything(1)
        model = network()
        optimizer = self._optimizer(model.parameters())
        for step in range(STEPS):
            rows = slice(step * BATCH, (step + 1) * BATCH)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(self.x[rows]), self.y[rows]).backward()
            optimizer.step()
        return model

    def _model(self) -> nn.Module:
        self.models.append(network())
        return self.models[-1]

    @staticmethod
    def _optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


class Adaptive(Recipe):
    """With an optimizer whose state depends on the scale of gradients, and a schedule that goes on from the rate as it is."""

    @staticmethod
    def _optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)

    @staticmethod
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def topology_of(folder: Path, groups: int, size: int, **sections: Any) -> Topology:
    profile = folder / "profile.json"
    layers = [{"name": n, "numel": m, "forward_s": f, "backward_s": b} for n, m, f, b in LAYERS]
    profile.write_text(json.dumps({"layers": layers}))
    document: dict[str, Any] = {
        "job": {"task": "given:task", "steps": STEPS, "timeout": "20 s"},
        "hosts": [{"name": "h[1-4]", "slots": 1}],
        "compute": {
            "groups": groups,
            "group_size": size,
            "batch_size": BATCH // groups,
            "bucket_size": "1 KiB",
            "device": "modelled",
            "profile": str(profile),
        },
        "exchange": {"kind": "model_server", "staleness": "sync"},
        "network": {"bandwidth": "1 Gbit/s", "latency": "100 us"},
        "data": {"shuffle": "none"},
        "simulation": {"payload": "real"},
    }
    for name, values in sections.items():
        document[name] = document.get(name, {}) | values if isinstance(values, dict) else values
    return Topology.from_dict(document)


def run(topology: Topology, *faults: Any) -> tuple[Result, Recipe, list[dict[str, Any]]]:
    recipe = Recipe()
    events: list[dict[str, Any]] = []
    options = Options(faults=faults, task=recipe.task(), on_report=lambda _, batch: events.extend(batch))
    return simulate(topology, options=options), recipe, events


@pairwise(
    {
        "groups, size": [(1, 1), (2, 2), (4, 1), (1, 4)],
        "exchange": {"server": {}, "servers": {"shards": 3}, "allreduce": {"kind": "allreduce", "staleness": "async", "shards": 1}},
        "overlap": [True, False],
    }
)
def test_equals_one_process(tmp_path: Path, groups: int, size: int, exchange: dict[str, Any], overlap: bool) -> None:
    """To summation order, in double precision."""
    result, recipe, _ = run(topology_of(tmp_path, groups, size, exchange=exchange, compute={"overlap": overlap}))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    alone = recipe.alone()
    assert len(recipe.models) == groups * size
    for model in recipe.models:
        for mine, its in zip(alone.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(its, mine, rtol=1e-12, atol=1e-13)


def test_loader_processes_are_none_in_simulated_time(tmp_path: Path) -> None:
    """The thread reads instead, and the run is the same each time."""
    found = []
    for workers in (0, 2, 2):
        recipe = Recipe()
        data = [(x, int(y)) for x, y in zip(recipe.x, recipe.y, strict=True)]
        task = recipe.task(train_data=data, num_workers=workers, transform=lambda batch: (batch[0] + torch.rand(12), batch[1]))
        before = psutil.Process().children(recursive=True)
        events: list[dict[str, Any]] = []
        options = Options(task=task, on_report=lambda _, batch, into=events: into.extend(batch))
        result = simulate(topology_of(tmp_path, 2, 2), options=options)
        assert (result.ending.status, result.broken) == ("done", []), result.ending.error
        assert psutil.Process().children(recursive=True) == before
        steps = [event for event in events if event["kind"] == "step"]
        found.append([(event["time"], event["values"]["loss"], event["values"]["data_s"]) for event in steps])
    assert found[0] == found[1] == found[2]
    assert all(data_s == 0 for _, _, data_s in found[0])


def test_a_stream_in_simulated_time_equals_one_process(tmp_path: Path) -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(data)

    recipe = Recipe()
    data = [(x, int(y)) for x, y in zip(recipe.x, recipe.y, strict=True)]
    topology = topology_of(tmp_path, 2, 2, job={"steps": None, "epochs": 1})
    result = simulate(topology, options=Options(task=recipe.task(train_data=Stream())))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    assert len({tuple(next(model.parameters()).flatten().tolist()) for model in recipe.models}) == 1


@pytest.mark.parametrize(("groups", "size"), [(1, 2), (4, 1)])
def test_with_an_fc_server_it_equals_one_process_too(tmp_path: Path, groups: int, size: int) -> None:
    """The FC server takes the time of its layer, and of its part of the update; workers take that of theirs."""
    exchange = {"merged_fc": True, "split": "4"}
    topology = topology_of(tmp_path, groups, size, hosts=[{"name": "h[1-5]", "slots": 1}], exchange=exchange)
    result, recipe, events = run(topology)
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    (last,) = [model for model in recipe.models if "4.weight" in model.state_dict()]
    expected = recipe.alone().state_dict()
    for model in recipe.models:
        for name, value in {**model.state_dict(), **last.state_dict()}.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-13)
    waits = [event["values"]["fc_wait_s"] for event in events if event["kind"] == "step"]
    assert len(waits) == STEPS * groups * size
    assert all(0.003 <= wait < 0.003 * groups + 0.005 for wait in waits)


def test_with_two_fc_servers_it_equals_one_process_too(tmp_path: Path) -> None:
    """Each takes half the time of the layer."""
    exchange = {"merged_fc": True, "split": "4", "fc_servers": 2}
    hosts = [{"name": "h[1-4]", "slots": 1}]
    result, recipe, events = run(topology_of(tmp_path, 1, 2, hosts=hosts, exchange=exchange))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    expected = recipe.alone().state_dict()
    convolutions = [model for model in recipe.models if "0.weight" in model.state_dict()]
    waits = [event["values"]["fc_wait_s"] for event in events if event["kind"] == "step"]
    assert all(0.0015 <= wait < 0.003 for wait in waits)
    for model in convolutions:
        for name in ("0.weight", "2.weight"):
            torch.testing.assert_close(model.state_dict()[name], expected[name], rtol=1e-12, atol=1e-13)


def test_a_run_repeats_to_the_bit(tmp_path: Path) -> None:
    topology = topology_of(tmp_path, 4, 1, exchange={"staleness": "async"}, compute={"noise": {"kind": "exponential"}})
    first, again = run(topology), run(topology)
    assert first[0].seconds == again[0].seconds
    assert first[2] == again[2]
    for mine, its in zip(first[1].models, again[1].models, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), its.parameters(), strict=True))


class TestTime:
    """How long steps take."""

    @staticmethod
    def _seconds(events: list[dict[str, Any]]) -> list[float]:
        return [event["values"]["seconds"] for event in events if event["kind"] == "step"]

    def test_compute_is_the_profiles(self, tmp_path: Path) -> None:
        """On a fast network a step takes what the layers take."""
        fast = {"bandwidth": "1000 Gbit/s", "latency": "1 us", "local_latency": "1 us"}
        _, _, events = run(topology_of(tmp_path, 2, 1, network=fast))
        assert self._seconds(events) == pytest.approx([STEP_S] * 2 * STEPS, rel=0.02)

    def test_parameters_are_exchanged_while_others_are_computed(self, tmp_path: Path) -> None:
        """With a latency that backward and forward hide, only the first layer's way there and back shows; without overlap all."""
        slow = {"latency": "4 ms", "local_latency": "4 ms"}
        _, _, overlapped = run(topology_of(tmp_path, 1, 1, network=slow))
        _, _, after = run(topology_of(tmp_path, 1, 1, network=slow, compute={"overlap": False}))
        # The bucket of the first layer is complete last, and needed first.
        for events in (overlapped, after):
            assert self._seconds(events)[2] == pytest.approx(STEP_S + 0.008, rel=0.05)
            exposed = [event["values"]["exposed_s"] for event in events if event["kind"] == "step"]
            assert exposed[2] == pytest.approx(0.008, rel=0.1)

    def test_overlap_hides_the_last_layers_bytes(self, tmp_path: Path) -> None:
        """At 1 Mbit/s the 2.7 kB of layers 2 and 4 take some 20 ms each way, while layer 0 computes for 30 ms."""
        narrow = {"bandwidth": "1 Mbit/s", "local_bandwidth": "1 Mbit/s"}
        steps = [
            self._seconds(run(topology_of(tmp_path, 1, 1, network=narrow, compute={"overlap": overlap}))[2])[2]
            for overlap in (True, False)
        ]
        assert steps[0] < steps[1] - 0.01

    def test_a_slow_host(self, tmp_path: Path) -> None:
        _, _, events = run(topology_of(tmp_path, 2, 1, network={"hosts": [{"name": "h2", "slowdown": 3.0}]}))
        assert max(self._seconds(events)) == pytest.approx(3 * STEP_S, rel=0.05)

    def test_without_a_profile_the_device_is_nominal(self, tmp_path: Path) -> None:
        topology = topology_of(tmp_path, 1, 1)
        compute = topology.compute.model_copy(update={"device": "cpu", "profile": None})
        _, _, events = run(topology.model_copy(update={"compute": compute}))
        parameters = sum(numel for _, numel, _, _ in LAYERS)
        nominal = 6 * parameters * BATCH / 20e9
        seconds = [event["values"]["compute_s"] for event in events if event["kind"] == "step"]
        assert seconds == pytest.approx([nominal] * STEPS, rel=0.01)


class TestFaults:
    """Threads in lockstep end with their processes."""

    def test_killed(self, tmp_path: Path) -> None:
        before = threading.active_count()
        result, _, _ = run(topology_of(tmp_path, 4, 1, job={"elastic": False}), kill("worker/2", step=3))
        assert result.ending.status == "failed"
        assert result.broken == []
        assert threading.active_count() == before

    def test_paused(self, tmp_path: Path) -> None:
        result, recipe, _ = run(topology_of(tmp_path, 4, 1), pause("worker/1", 3.0, step=2))
        assert (result.ending.status, result.broken) == ("done", [])
        assert result.seconds > 3
        for mine, its in zip(recipe.alone().parameters(), recipe.models[0].parameters(), strict=True):
            torch.testing.assert_close(its, mine, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("groups", "size", "more"),
    [
        (2, 2, {}),
        (1, 4, {"optimizer": {"clip_norm": 0.3}}),
        (2, 2, {"exchange": {"kind": "allreduce", "staleness": "async", "every": 2}}),
        (2, 2, {"job": {"on_resize": "linear"}}),
        (1, 4, {"job": {"on_resize": "sqrt"}, "optimizer": {"clip_norm": 0.3}}),
        (2, 2, {"job": {"on_resize": "linear"}, "exchange": {"kind": "allreduce", "staleness": "async", "every": 2}}),
        (2, 2, {"job": {"on_resize": "sqrt", "name": "adaptive"}}),
    ],
    ids=["groups", "clipped", "every", "linear", "sqrt-clipped", "linear-every", "sqrt-adaptive"],
)
def test_all_reduce_without_a_lost_worker_equals_one_process(tmp_path: Path, groups: int, size: int, more: dict[str, Any]) -> None:
    """One process that trains what counted, with the same optimizer. The lost worker comes back."""
    steps, every = 16, more.get("exchange", {}).get("every", 1)
    job = {"elastic": True, "restarts": 1, "steps": steps, "on_resize": "keep"} | more.get("job", {})
    sections: dict[str, Any] = {"exchange": {"kind": "allreduce", "staleness": "async"}} | more | {"job": job}
    shape = topology_of(tmp_path, groups, size, **sections)
    takes: dict[tuple[str, int], Any] = {}
    counted: dict[int, list[str]] = {}

    def hear(peer: str, what: str, values: Any) -> None:
        if what == "divides":
            takes[peer, values["step"]] = values["spans"]
        elif what == "counted":
            counted[values["step"]] = values["members"]

    adaptive = shape.job.name == "adaptive"
    recipe = Adaptive() if adaptive else Recipe()
    task = recipe.task(schedule=Adaptive.schedule if adaptive else None)
    result = simulate(shape, options=Options(faults=[kill("worker/1", step=5)], task=task, on_audit=hear))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    seed_everything(1)
    model = network()
    optimizer = recipe._optimizer(model.parameters())
    schedule = Adaptive.schedule(optimizer) if adaptive else None
    for step in range(every - 1, steps, every):
        spans = [
            span for each in range(step - every + 1, step + 1) for peer in counted[step] for span in takes.get((peer, each), ())
        ]
        rows = [place % SAMPLES for start, stop in spans for place in range(start, stop)]
        due = [peer for peer in {peer for peer, _ in takes} if takes.get((peer, step))]
        if shape.job.on_resize != "keep":
            shares = {sum(stop - start for start, stop in takes[peer, step]) for peer in due}
            assert shares == {groups * shape.compute.batch_size // 4}
        lr = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = (
            lr * {"keep": 1.0, "linear": len(due) / 4, "sqrt": (len(due) / 4) ** 0.5}[job["on_resize"]]
        )
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(recipe.x[rows]), recipe.y[rows]).backward()
        if shape.optimizer.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), shape.optimizer.clip_norm)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = lr
        if schedule is not None:
            schedule.step()
    assert min(map(len, counted.values())) == 3
    assert len(recipe.models) == 5
    same = 0
    for survivor in recipe.models:
        pairs = zip(model.parameters(), survivor.parameters(), strict=True)
        same += all(torch.allclose(its, mine, rtol=1e-12, atol=1e-13) for mine, its in pairs)
    assert same == 4, "all but the lost one"


def test_synchronous_servers_without_lost_workers_equal_one_process(tmp_path: Path) -> None:
    """One is lost early, so that the last step has batches for some groups only; another one is lost in that step, and a group
    that had none takes over its batch."""
    asked = {"job": {"elastic": True, "steps": None, "epochs": 1}, "compute": {"overlap": False}}  # so that no batch is torn
    shape = topology_of(tmp_path, 4, 1, **asked)
    takes: dict[tuple[int, int], int] = {}
    updates: dict[str, dict[int, list[int]]] = {}

    def hear(peer: str, what: str, values: Any) -> None:
        if what == "takes":
            takes[int(peer.partition("/")[2]), values["step"]] = values["slot"]
        elif what == "applied":
            slots = [takes[group, step] for group, step, _ in values["reads"] if group not in values["skipped"]]
            updates.setdefault(f"{peer}/{values['piece']}", {})[values["version"]] = slots

    recipe = Recipe()
    faults = [kill("worker/2", step=3), kill("worker/0", step=9)]
    result = simulate(shape, options=Options(faults=faults, task=recipe.task(), on_audit=hear))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    of_a_piece, *others = updates.values()
    assert all(other == of_a_piece for other in others)
    assert sorted(slot for slots in of_a_piece.values() for slot in slots) == list(range(32))
    assert [len(slots) for slots in of_a_piece.values()] == [4, 4, 4, *[3] * 6, 1, 1], of_a_piece
    seed_everything(1)
    model = network()
    optimizer, batch = recipe._optimizer(model.parameters()), shape.compute.batch_size
    for slots in of_a_piece.values():
        rows = [row for slot in slots for row in range(slot * batch, (slot + 1) * batch)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(recipe.x[rows]), recipe.y[rows]).backward()
        optimizer.step()
    same = 0
    for survivor in recipe.models:
        pairs = zip(model.parameters(), survivor.parameters(), strict=True)
        same += all(torch.allclose(its, mine, rtol=1e-12, atol=1e-13) for mine, its in pairs)
    assert same == 2, "those that are left"


def test_a_task_that_raises(tmp_path: Path) -> None:
    class Broken(Recipe):
        def _model(self) -> nn.Module:
            model = super()._model()
            if len(self.models) == 2:
                model.register_forward_pre_hook(lambda *_: 1 / 0)
            return model

    recipe = Broken()
    result = simulate(topology_of(tmp_path, 4, 1), options=Options(task=recipe.task()))
    assert result.ending.exit_code == 3
    assert result.ending.error is not None
    assert "ZeroDivisionError" in result.ending.error["message"]


@pytest.mark.parametrize(
    ("sections", "size"),
    [
        ({"exchange": {"kind": "allreduce", "staleness": "async"}}, 2),
        ({}, 2),
        ({"exchange": {"kind": "gossip", "staleness": "async"}}, 1),
        ({"exchange": {"kind": "averaging", "staleness": "async"}}, 1),
        ({"compute": {"grid": "2x1"}, "exchange": {"kind": "allreduce", "staleness": "async"}}, 2),
    ],
)
def test_nothing_of_a_run_is_kept(sections: dict[str, Any], size: int, tmp_path: Path) -> None:
    """Torch's own references are not seen by Python: models whose hooks refer to them were kept, those of all runs of a process."""
    topology = topology_of(tmp_path, 2, size, **sections)
    ending, recipe, _ = run(topology)
    assert ending.ending.status == "done", ending
    models = [weakref.ref(model) for model in recipe.models]
    recipe.models.clear()
    del ending
    gc.collect()
    assert models
    assert not [model for model in models if model() is not None]
