"""Batch norm over all processes of a grid against the plain one."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.parallel.domain_world import randomised
from tests.parallel.test_geometry import divisions
from tests.precision import close, exactly, judge_of
from zmqtrain.collectives.operations import sent_by_all_reduce
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.domain.batch_norm import DomainBatchNorm2d
from zmqtrain.parallel.geometry import Division, even
from zmqtrain.parallel.grid import Grid
from zmqtrain.testing.threads import ThreadFabric, run_ranks

FORWARD, BACKWARD = Label("norm", "statistics", "forward"), Label("norm", "statistics", "backward")


def check(grid: Grid, module: nn.BatchNorm2d, division: Division, samples: Division, dtype: torch.dtype = torch.float64) -> None:
    """Two steps of training and one of evaluation; the second on numbers far from zero."""
    module = randomised(module, dtype)  # type: ignore[assignment]
    plain, judge = copy.deepcopy(module), judge_of(module)
    generator = torch.Generator().manual_seed(1)
    shape = (samples[-1][1], module.num_features, division[-1][1], 3)
    images = [torch.randn(shape, dtype=dtype, generator=generator) * 3 + offset for offset in (0, 20, 5)]
    gradients = [torch.randn(shape, dtype=dtype, generator=generator) for _ in images]

    def steps(layer: nn.Module, part: tuple[slice, ...], type_: torch.dtype = dtype) -> list[Tensor]:
        found = []
        for step, (image, gradient) in enumerate(zip(images, gradients, strict=True)):
            layer.train(step < 2)
            own = image[part].to(type_, copy=True).requires_grad_()
            result = layer(own)
            result.backward(gradient[part].to(type_))
            assert own.grad is not None
            found += [result.detach(), own.grad]
        return found

    expected, exact = steps(plain, (slice(None),)), steps(judge, (slice(None),), torch.float64)
    parts = [
        (slice(*samples[column]), slice(None), slice(*division[row]))
        for row, column in (grid.place(rank) for rank in range(grid.size))
    ]

    def run(fabric: ThreadFabric) -> tuple[list[Tensor], nn.Module]:
        layer = DomainBatchNorm2d(
            copy.deepcopy(module),
            "norm",
            fabric.among(grid.column(fabric.rank)),
            division,
            statistics=fabric.among(tuple(range(grid.size))),
        )
        assert layer.state_dict().keys() == module.state_dict().keys()
        return steps(layer, parts[fabric.rank]), layer

    results, world = run_ranks(grid.size, run)
    for rank, (found, layer) in enumerate(results):
        here = parts[rank]
        for what, (one, whole, judged) in enumerate(zip(found, expected, exact, strict=True)):
            close(one, whole[here], f"tensor {what} of rank {rank}", exact=judged[here], least=1.0)
        for name, buffer in plain.named_buffers():
            close(layer.get_buffer(name), buffer, name, exact=exactly(judge.get_buffer(name)), least=1.0)
            assert torch.equal(layer.get_buffer(name), results[0][1].get_buffer(name)), "the same bits on all"
        assert {label.term for label in world.traffic[rank].messages} <= {"statistics"}
    for name, parameter in plain.named_parameters():
        total = sum(layer.get_parameter(name).grad for _, layer in results)  # type: ignore[misc]
        close(total, parameter.grad, name, exact=judge.get_parameter(name).grad, least=1.0)  # type: ignore[arg-type]


@given(st.data())
@settings(max_examples=15)
def test_statistics_are_those_of_all_samples_and_rows(data: st.DataObject) -> None:
    grid = Grid(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)))
    rows, samples = data.draw(st.integers(2, 7)), data.draw(st.integers(1, 5))
    module = nn.BatchNorm2d(3, momentum=data.draw(st.sampled_from([0.1, 0.3, None])), affine=data.draw(st.booleans()))
    division = data.draw(st.one_of(st.just(even(rows, grid.rows)), divisions(rows, grid.rows)))
    check(grid, module, division, even(samples, grid.columns), data.draw(st.sampled_from([torch.float64, torch.float32])))


def test_without_running_statistics() -> None:
    check(Grid(2, 2), nn.BatchNorm2d(3, track_running_stats=False), even(5, 2), even(3, 2))


def test_one_gather_forward_and_one_sum_backward_but_none_for_the_first_layer() -> None:
    def run(fabric: ThreadFabric) -> None:
        everybody = fabric.among((0, 1, 2))
        layer = DomainBatchNorm2d(nn.BatchNorm2d(4), "norm", everybody, even(6, 3), statistics=everybody)
        layer(torch.randn(2, 4, 2, 3, requires_grad=fabric.world.needed)).sum().backward()  # type: ignore[attr-defined]
        layer.eval()(torch.randn(2, 4, 2, 3))

    for needed in (True, False):
        _, world = run_ranks(3, lambda fabric, needed=needed: (setattr(fabric.world, "needed", needed), run(fabric)))
        for rank, sent in enumerate(world.traffic):
            expected = sent_by_all_reduce(2 * 4, 8, 3, rank)
            assert sent.nbytes[FORWARD] == 2 * 8 * (1 + 2 * 4)
            assert (sent.messages[BACKWARD], sent.nbytes[BACKWARD]) == (expected if needed else (0, 0))


def test_local_statistics_are_those_of_the_strip() -> None:
    image = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(1))

    def run(fabric: ThreadFabric) -> None:
        layer = DomainBatchNorm2d(nn.BatchNorm2d(3), "norm", fabric.among((0, 1)), ((0, 6), (6, 6)), statistics=None)
        own = image if fabric.rank == 0 else image[:, :, :0]
        result = layer(own)
        result.sum().backward()
        assert layer.weight is not None
        assert layer.weight.grad is not None, "also on a strip of no rows, so that all can sum it"
        if fabric.rank == 0:
            torch.testing.assert_close(result, nn.BatchNorm2d(3)(image))

    _, world = run_ranks(2, run)
    assert all(not sent.messages for sent in world.traffic)


def test_a_single_value_has_no_variance() -> None:
    def run(fabric: ThreadFabric) -> None:
        everybody = fabric.among((0, 1))
        layer = DomainBatchNorm2d(nn.BatchNorm2d(2), "norm", everybody, even(1, 2), statistics=everybody)
        layer(torch.zeros(1, 2, 1 - fabric.rank, 1))

    with pytest.raises(ValueError, match="norm: expected more than 1 value"):
        run_ranks(2, run)
