"""Seeds for torch's generators: draws are those after `torch.manual_seed`."""

from __future__ import annotations

import pytest
import torch

from zmqtrain.data.seeding import seed_torch


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
@pytest.mark.parametrize("cuda", [None, ()], ids=["all devices", "the CPU"])
def test_draws_are_those_of_torch(seed: int, cuda: tuple[()] | None) -> None:
    torch.random.manual_seed(seed)
    expected = torch.randn(3)
    seed_torch(seed, cuda)
    assert torch.equal(torch.randn(3), expected)


def test_devices_that_come_later_are_seeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch knows a kind of device, it remembers the seed for it."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    seed_torch(5)
    seed_torch(6, ())
    assert seeds == [5]
