"""Upsampling on strips against the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.parallel.domain_world import check_layer, check_overlap
from tests.parallel.test_geometry import divisions
from zmqtrain.errors import UsageError
from zmqtrain.parallel.domain.upsample import DomainUpsample
from zmqtrain.parallel.geometry import even
from zmqtrain.testing.threads import run_ranks

MODES = [
    ("nearest", None),
    ("nearest-exact", None),
    ("bilinear", False),
    ("bilinear", True),
    ("bicubic", False),
    ("bicubic", True),
]


@given(st.data())
@settings(max_examples=60)
def test_upsampling(data: st.DataObject) -> None:
    members, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 14))
    mode, corners = data.draw(st.sampled_from(MODES))
    how: dict[str, Any] = data.draw(
        st.one_of(
            st.builds(lambda size: {"size": (size, 9)}, st.integers(1, 40)),
            st.sampled_from([{"scale_factor": 2}, {"scale_factor": (3, 1.5)}, {"scale_factor": (1.7, 2)}]),
            st.just({"scale_factor": 2.3, "recompute_scale_factor": True}),
        )
    )
    module = nn.Upsample(mode=mode, align_corners=corners, **how)
    division = data.draw(st.one_of(st.none(), divisions(rows, members)))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    check_layer(DomainUpsample, module, (2, 3, rows, 5), members, division=division, dtype=dtype, choices=True)
    check_layer(DomainUpsample, module, (2, 3, 4, rows), members, division=division, dtype=dtype, dim=3, choices=True)


@pytest.mark.parametrize(("rows", "size"), [(2, 164), (4, 164), (49, 147), (83, 255)])
def test_torch_rounds_the_source_of_a_row_and_so_do_strips(rows: int, size: int) -> None:
    """In single precision row 82 of 164 comes from row 0 of 2, and not from row 1, which is at the same side of the cut.

    In double precision torch's own backward takes the rows of single precision, and so is not that of its forward; ours is.
    """
    module, shape = nn.Upsample(size=(size, 2)), (1, 1, rows, 2)
    check_layer(DomainUpsample, module, shape, 2, dtype=torch.float32, choices=True)
    check_layer(DomainUpsample, module, shape, 2, input_gradient=False)


def test_doubling_by_nearest_sends_nothing_and_by_bilinear_a_row_each_way() -> None:
    world = check_layer(DomainUpsample, nn.UpsamplingNearest2d(scale_factor=2), (1, 2, 12, 3), 3)
    assert all(not sent.messages for sent in world.traffic)
    world = check_layer(DomainUpsample, nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 12, 3), 3)
    assert [sum(sent.messages.values()) for sent in world.traffic] == [2, 4, 2]


def test_the_interior_is_computed_before_anything_arrives() -> None:
    check_overlap(DomainUpsample, nn.UpsamplingBilinear2d(scale_factor=2), (1, 2, 15, 3))


def test_what_cannot_be_divided() -> None:
    module = nn.Upsample(scale_factor=2, mode="lanczos")
    with pytest.raises(UsageError, match="layer: upsampling with mode='lanczos' cannot be divided"):
        run_ranks(1, lambda fabric: DomainUpsample(module, "layer", fabric.among((0,)), even(8, 1)))
