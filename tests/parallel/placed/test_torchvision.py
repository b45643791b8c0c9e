"""torchvision's models divided are the models: losses, gradients, weights and buffers after a step, and outputs in eval mode."""

from __future__ import annotations

import pytest

from tests.parallel.placed.training import Training, compare
from tests.parallel.placed.vision import MODELS, images, made

BATCH = 5
RATE = 0.001  # with more, steps are so long that rounding grows
GRIDS = ("2x1", "2x2", "3x1", "1x4")
#: Each has one combination: variants of models that are here, and those that take as long as ten others.
ONCE = {
    "densenet121_memory_efficient": ("domain", "2x2"),
    "efficientnet_b0_stochastic": ("mixed", "2x2"),
    "convnext_tiny_stochastic": ("domain", "3x1"),
    "swin_t_stochastic": ("model", "1x4"),
    "googlenet": ("domain", "2x1"),
    "inception_v3": ("domain", "3x1"),
    "inception_v3_aux": ("batch", "2x1"),
}
#: Every other model in strips, and every second one by each of the plans that divide channels, which meet every grid.
COMBINATIONS = [
    combination
    for number, name in enumerate(each for each in MODELS if each not in ONCE)
    for combination in (
        (name, "domain", GRIDS[number % 3]),
        (name, ("model", "mixed")[number % 2], GRIDS[number // 2 % 4]),
    )
]
#: A batch alone is divided for all models alike, but for what their samples share: statistics, and what is drawn.
BATCHES = [("resnet50", "batch", "2x2"), ("vit_b_16", "batch", "3x1"), ("mobilenet_v3_small", "batch", "1x4")]


@pytest.mark.parametrize(("name", "plan", "grid"), [*COMBINATIONS, *BATCHES, *((name, *each) for name, each in ONCE.items())])
def test_models_equal_one_process(name: str, plan: str, grid: str) -> None:
    left_whole = compare(lambda: made(name), Training(images(name, BATCH), steps=1, rate=RATE), plan, grid)
    assert plan != "domain" or not left_whole  # all their operators have rules, in strips, too
