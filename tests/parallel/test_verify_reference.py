"""One process of a host runs the ordinary model, and tells the others what belongs to their parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.verify import Verified, reference, verdict, verify
from zmqtrain.parallel.verify.line import Line
from zmqtrain.testing.threads import run_ranks
from zmqtrain.train.verifying import one_of_each

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def perceptron(*more: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def run(model: nn.Module, grid: str = "2x2", **settings: Any) -> list[Verified]:
    def on_rank(fabric: Fabric) -> Verified:
        return verify(model, grid, fabric=fabric, inputs=(X,), target=torch.arange(4), loss=functional.cross_entropy, **settings)

    return run_ranks(Grid.parse(grid).size, on_rank)[0]


def test_a_line_carries_values_and_tensors_of_any_kind() -> None:
    sent = [torch.arange(3, dtype=torch.int16), torch.zeros(0, 2), torch.tensor(True), torch.randn(3, 4).double().t()]

    def on_rank(fabric: Fabric) -> Any:
        if fabric.rank == 1:
            return None
        line = Line(fabric, (0, 2))
        if fabric.rank == 0:
            line.send(2, ["first", {"of": 0.5}], sent)
            return line.send(2, "second")
        return line.receive(0), line.receive(0)

    (value, tensors), second = run_ranks(3, on_rank)[0][2]
    assert value == ["first", {"of": 0.5}]
    for one, other in zip(tensors, sent, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert second == ("second", [])


def test_one_process_of_each_host_runs_the_ordinary_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_of_each(["a", "b", "a", "c", "b"]) == (0, 1, 0, 3, 1)
    ran: list[int] = []
    original = reference._Ordinary.run
    monkeypatch.setattr(reference._Ordinary, "run", lambda self: (ran.append(1), original(self)))
    assert run(perceptron(), optimizer=torch.optim.AdamW) == [Verified(4, "float64")] * 4
    assert len(ran) == 1


def test_it_has_the_threads_of_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    had: list[tuple[int, int]] = []
    original = reference._Ordinary.run
    monkeypatch.setattr(reference._Ordinary, "run", lambda self: (had.append((before, torch.get_num_threads())), original(self)))
    before = torch.get_num_threads()
    monkeypatch.setattr(reference, "processors", lambda: 3 * before)
    run(perceptron())
    assert had == [(before, 3 * before)]  # of four processes, but there are no more processors
    assert torch.get_num_threads() == before


def test_processes_may_each_have_another_one_that_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of_two_hosts = verdict.compare
    monkeypatch.setattr(verdict, "compare", lambda case, *rest: of_two_hosts(verdict.replace(case, references=(0, 1, 0, 1)), *rest))
    assert run(perceptron(), optimizer=torch.optim.AdamW) == [Verified(4, "float64")] * 4


def test_gradients_are_sent_while_the_backward_goes_on_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_TOGETHER_BYTES", 1)
    kept: list[int] = []
    original = reference._Serving.gradient

    def gradient(self: Any, name: str, whole: Tensor) -> None:
        original(self, name, whole)
        kept.append(sum(each.grad is not None for each in made[-1].parameters()) + len(self._gradients))

    made: list[nn.Module] = []
    make = reference.made
    monkeypatch.setattr(reference, "made", lambda case: (made.append(make(case)), made[-1])[1])
    monkeypatch.setattr(reference._Serving, "gradient", gradient)
    run(perceptron())
    assert kept == [0] * 6


def test_an_optimizer_sees_two_parameters_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    original = reference._Serving.tell

    def tell(self: Any, what: str, about: Any, parts: Any) -> None:
        if what == "update":
            seen.append(about[0])
        original(self, what, about, parts)

    monkeypatch.setattr(reference._Serving, "tell", tell)
    run(perceptron(nn.Linear(8, 8), nn.Tanh()), "2x1", optimizer=torch.optim.AdamW)
    kinds = {"2.weight", "6.weight", "0.bias", "6.bias"}  # the largest and the smallest
    assert set(seen) == kinds
    seen.clear()
    run(perceptron(), "1x2", optimizer=torch.optim.AdamW)
    assert not seen


class InSingle(nn.Module):
    """Fails in double precision, in its backward alone."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if gradient.dtype is torch.float64:
                raise RuntimeError("not in double precision")
            return gradient * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.Twice.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("nothing there")


def test_all_hear_that_it_does_not_run_in_double_precision() -> None:
    model = perceptron(InSingle()).float()

    def on_rank(fabric: Fabric) -> Verified:
        return verify(model, "2x1", fabric=fabric, inputs=(X.float(),))

    assert run_ranks(2, on_rank)[0] == [Verified(4, "float32")] * 2


def test_all_hear_why_it_does_not_run_at_all() -> None:
    said: list[str] = []
    model = perceptron(Fails())

    def on_rank(fabric: Fabric) -> None:
        try:
            verify(model, "2x1", fabric=fabric, inputs=(X,))
        except (KeyError, RuntimeError) as error:
            said.append(str(error))

    run_ranks(2, on_rank)
    assert len(said) == 2
    assert any("the worker of rank 0 runs for this one, raised KeyError: 'nothing there'" in each for each in said)


def test_a_process_says_which_part_it_needs() -> None:
    model = perceptron()
    whole = model.state_dict()

    def on_rank(fabric: Fabric) -> Any:
        divided = parallelize(copy.deepcopy(model), "2x1", fabric=fabric)
        needs = reference.Needs.of_model(divided)
        assert reference.Needs.from_json(needs.to_json()) == needs
        for name, parameter in divided.named_parameters():
            assert torch.equal(needs.parameters[name].of(whole[name]), parameter)
        return True

    assert run_ranks(2, on_rank)[0] == [True, True]
