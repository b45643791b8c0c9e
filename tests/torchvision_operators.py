"""torchvision can be imported where its own operators cannot be loaded.

The wheel of the package index is built for CUDA, and its library does not load beside a torch without it. No model here uses its
operators, but two must be known when it is imported, which transformers and Lightning do, too, wherever it is installed.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")  # what it defines is known as long as it lives


def define() -> None:
    """Call it before torchvision is imported."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
