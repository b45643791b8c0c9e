"""A divided model is compared on a part of each image only where it does the same to it, and every fault is still noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.parallel.faults import FAULTS
from tests.parallel.test_verify import KINDS, OF_COLUMNS, SAMPLES, Images, plan_of, seeded
from zmqtrain.data.batch import Batch
from zmqtrain.errors import DifferentModelError
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.plan import Choice, LayerPlan, Plan
from zmqtrain.parallel.rehearsal import rehearse
from zmqtrain.parallel.verify import Case, Verified, verified
from zmqtrain.parallel.verify.case import alone
from zmqtrain.parallel.verify.smaller import cropped, parts_of, sizes_of
from zmqtrain.parallel.verify.verdict import PlainShare, ramp
from zmqtrain.testing.threads import run_ranks


def images(height: int, width: int, samples: int = SAMPLES) -> Tensor:
    return torch.randn(samples, 3, height, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def case_of(make: Callable[[], nn.Module], grid: Grid, plan: Plan, fabric: Fabric, batch: Batch, **settings: Any) -> Case:
    settings = {"loss": ramp, "optimizer": None, "references": ()} | settings
    with alone():
        model = make()
    return Case(
        make=lambda: copy.deepcopy(model),
        divide=lambda: parallelize(copy.deepcopy(model), grid, plan, fabric=fabric, seed=5),
        batch=batch,
        share=PlainShare,
        seed=5,
        local_statistics=False,
        dtype=torch.float64,
        smaller=True,
        **settings,
    )


def compared(
    make: Callable[[], nn.Module],
    inputs: tuple[Any, ...],
    target: Any = None,
    *,
    grid: str = "2x1",
    choice: Choice = "domain",
    **settings: Any,
) -> Verified:
    """On all ranks, with convolutions divided by ``choice``."""
    wanted = Grid.parse(grid)
    plan = plan_of(make(), wanted, choice, "batch" if choice == "batch" else "model")

    def on_rank(fabric: Fabric) -> Verified:
        batch = Batch(inputs, target, len(inputs[0]))
        return verified(case_of(make, wanted, plan, fabric, batch, **settings), fabric)

    found, *others = run_ranks(wanted.size, on_rank)[0]
    assert others == [found] * len(others)
    return found


class Net(nn.Module):
    """Convolutions that halve their images, and a head."""

    def __init__(self, halved: int = 3, head: nn.Module | None = None, kernel: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number in range(halved):
            layers += [nn.Conv2d(4 if number else 3, 4, kernel, stride=2, padding=kernel // 2), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(4, 4, kernel, padding=kernel // 2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)) if head is None else head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))  # type: ignore[no-any-return]


class Looking(Net):
    """Does something else to large images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.shape[-1] < 100 else functional.relu(x))


class Trying(Net):
    """Does something that numbers decide."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.mean().item() < 100 else functional.relu(x))


class InEvaluation(Net):
    """Looks at sizes where it does not train."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training or x.shape[-1] < 100 else functional.relu(x))


class Turned(Net):
    """Has strips of what was the width."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(2, 3))


class InOne(nn.Module):
    """Convolutions over rows after one another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows = nn.Conv2d(3, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(self.layer(x).flatten(2)).mean(2)  # type: ignore[no-any-return]


class ByChance(Net):
    """Leaves layers out."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for _ in range(10):
            x = functional.relu(x) if float(torch.rand(())) < 0.5 else x * 2
        return self.head(x)  # type: ignore[no-any-return]


#: Model, height and width, and of what is compared.
TAKEN: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], str]] = {
    "even strips": (Net, (128, 128), "48x48"),
    "what is small is whole": (Net, (64, 64), ""),
    "uneven strips at the end": (lambda: Net(5), (224, 224), "96x48"),
    "height and width differ": (Net, (128, 192), "48x80"),
    "one side is small": (Net, (32, 192), "32x48"),
    "every weight meets something": (lambda: Net(4, kernel=7), (160, 160), "96x64"),
    "strips that cannot be lower may be narrower": (Net, (121, 128), "121x48"),
    "what differs still does": (Net, (64, 192), "48x80"),
    "strips of images that are turned": (Turned, (121, 160), ""),
    "rows after one another": (InOne, (121, 160), ""),
    "a head of that size": (lambda: Net(3, nn.Sequential(nn.Flatten(), nn.Linear(4 * 16 * 16, 3))), (128, 128), ""),
    "a pool to several positions": (lambda: Net(5, nn.AdaptiveAvgPool2d(3)), (160, 160), ""),
    "a resize by a factor": (lambda: Net(2, nn.Upsample(scale_factor=2)), (128, 128), "48x48"),
    "a resize to a size": (lambda: Net(2, nn.Upsample((40, 40))), (128, 128), ""),
    "a model that leaves layers out": (ByChance, (128, 128), "48x48"),
    "a model that looks at sizes": (Looking, (128, 128), ""),
    "one that does so in evaluation": (InEvaluation, (128, 128), ""),
    "one that looks at numbers": (Trying, (128, 128), ""),
}


@pytest.mark.parametrize("name", TAKEN)
def test_parts_of_images_are_taken_where_the_same_is_done_to_them(name: str) -> None:
    make, (height, width), expected = TAKEN[name]
    assert compared(seeded(make), (images(height, width, 2),)) == Verified(2, "float64", expected)


def test_strips_are_cut_at_the_same_places_of_kernels() -> None:
    """The last images of 224 have 7 rows. Of 160 they have 5: uneven in 4 strips, too, but strides begin elsewhere in them."""
    make = seeded(lambda: Net(5))
    assert compared(make, (images(224, 224, 2),), grid="1x2", choice="batch").images == "48x48"
    assert compared(make, (images(224, 224, 2),), grid="4x1").images == "224x48"
    assert compared(make, (images(256, 256, 2),), grid="4x1").images == "128x48"


def test_targets_of_each_pixel_are_cut_as_well() -> None:
    make = seeded(lambda: Net(1, nn.Upsample(scale_factor=2)))
    target = torch.arange(2 * 128 * 96).view(2, 128, 96) % 4
    found = compared(make, (images(128, 96, 2),), target, loss=functional.cross_entropy)
    assert found.images == "80x48"


def test_a_model_that_fails_on_parts_of_images_is_compared_on_whole_ones() -> None:
    class Pointing(Net):
        """Has a look at some places, by their numbers."""

        def forward(self, x: Tensor, rows: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + x[torch.arange(len(x)), 0, rows][:, :3]

    rows = torch.tensor([100, 120])
    assert compared(seeded(Pointing), (images(128, 128, 2), rows), choice="model") == Verified(2, "float64", "")


def test_the_middle_is_taken() -> None:
    x, mask = images(100, 80, 2), torch.ones(2, 100, 80)
    batch = cropped(Batch((x, mask, torch.zeros(2, 5)), {"boxes": torch.zeros(2, 4, 4)}, 2), {(100, 80): (64, 65)})
    assert torch.equal(batch.inputs[0], x[:, :, 18:82, 7:72])
    assert [tuple(each.shape) for each in batch.inputs[1:]] == [(2, 64, 65), (2, 5)]
    assert tuple(batch.target["boxes"].shape) == (2, 4, 4)


OF_IMAGES = [name for name, (kind, _) in FAULTS.items() if KINDS[kind][1] is KINDS["images"][1]]


@cache
def unbroken(height: int, width: int, *, grid: str, choice: Choice) -> Verified:
    """Without any fault: the same before each of them."""
    target = torch.arange(SAMPLES) % 5
    return compared(seeded(Images), (images(height, width),), target, grid=grid, choice=choice, loss=functional.cross_entropy)


@pytest.mark.parametrize(("height", "width", "taken"), [(96, 96, "48x48"), (40, 96, "40x48")])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_every_broken_rule_is_noticed(name: str, height: int, width: int, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, breaks = FAULTS[name]
    settings: dict[str, Any] = {"grid": "1x2" if name in OF_COLUMNS else "2x1", "choice": KINDS[kind][2]}
    assert unbroken(height, width, **settings).images == taken
    given = (images(height, width),), torch.arange(SAMPLES) % 5
    settings |= {"loss": functional.cross_entropy}
    breaks(monkeypatch)
    with pytest.raises(DifferentModelError, match="another one than in one process"):
        compared(seeded(Images), *given, **settings)


@pytest.mark.parametrize(
    ("grid", "strips", "side"),
    [
        ("2x1", "height", 224),
        ("3x1", "width", 256),
        ("4x1", "2x2", 224),
        ("2x2", "height", 256),
        ("4x1", "height", 224),
        ("4x1", "height", 256),
    ],
)
def test_the_same_messages_are_sent(grid: str, strips: str, side: int) -> None:
    """Which, and how many, on every rank: only their sizes differ."""
    wanted, make = Grid.parse(grid), seeded(lambda: Net(5))
    x = images(side, side)
    layers = [LayerPlan(f"layers.{2 * number}", "domain", wanted, strips) for number in range(6)]
    plan = Plan((*layers, LayerPlan("head.2", "model", wanted)))

    def found(fabric: Fabric) -> Any:
        case = case_of(make, wanted, plan, fabric, Batch((x,), None, SAMPLES))
        return sizes_of(case, case.make(), case.batch, parts_of(case.divide()))

    sizes = run_ranks(wanted.size, found)[0][0]
    assert sizes, "images are taken whole"
    whole, part = (
        rehearse(make(), batch.inputs, wanted, plan, SAMPLES)
        for batch in (Batch((x,), None, SAMPLES), cropped(Batch((x,), None, SAMPLES), sizes))
    )
    for one, other in zip(whole, part, strict=True):
        assert [(label, sent.messages) for label, sent in one.items()] == [(label, sent.messages) for label, sent in other.items()]
