"""torch's encoder puts zeros in place of padding in evaluation: so it does where it is divided, and only there."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.placed.training import CLASSES, Training, compare
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.verify import Verified, verify
from zmqtrain.testing.threads import run_ranks

SAMPLES, TIME, WIDTH = 5, 6, 8
SEQUENCES = torch.randn(SAMPLES, TIME, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LENGTHS = torch.tensor([2, 6, 4, 3, 1])
LAST = torch.arange(TIME) >= LENGTHS[:, None]
MASKS = {"last": LAST, "first": LAST.flip(1), "numbers": torch.zeros(LAST.shape).masked_fill(LAST, -math.inf).double()}


class Padded(nn.Module):
    """The mean over all positions, padding as well."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        norm = nn.LayerNorm(WIDTH) if mask == "numbers" else None
        self.mask, self.encoder, self.head = mask, nn.TransformerEncoder(layer, 2, norm), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mask = MASKS[self.mask][: x.shape[0]]
        return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", ["model", "batch"])
@pytest.mark.parametrize(("mask", "grid"), [("last", "2x2"), ("first", "2x1"), ("numbers", "1x3")])
def test_padding_becomes_what_it_becomes_in_one_process(mask: str, plan: str, grid: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return Padded(mask).double()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        assert not compare(made, Training(SEQUENCES), plan, grid)


def test_verification_sees_the_zeros_too() -> None:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return Padded("last")

    def run(fabric: Fabric) -> Verified:
        target = torch.arange(SAMPLES - 1)
        given = SEQUENCES[: SAMPLES - 1]
        return verify(made, "2x2", fabric=fabric, inputs=(given,), target=target, loss=nn.functional.cross_entropy)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        assert run_ranks(4, run)[0][0] == Verified(SAMPLES - 1, "float64")
