"""``[plan]``: what `zmqtrain plan` takes into account, beside the job itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from zmqtrain.topology import units
from zmqtrain.topology.section import Section, Written, _tuple

#: The memory limit of a process: from one MiB to 16 TiB.
Memory = Annotated[
    int, BeforeValidator(units.size(2**20, 2**44)), PlainSerializer(units.format_size), Written(("16 GiB", "800 MB"))
]
Count = Annotated[int, Field(ge=1, le=2**20)]


def _overlap(value: Any) -> Any:
    if value in ("none", "perfect"):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError('must be "none", "perfect", or a number from 0 to 1')
    return float(value)


#: Operations per second of the nominal device, which stands for one that was not measured: about those of one core.
NOMINAL_FLOPS = 20e9


class PlanSection(Section):
    """How the planner prices and compares plans."""

    layers: str | None = Field(
        default=None,
        min_length=1,
        description="Plan for a shipped table of layers instead of the task's model or the profile: `alexnet` or "
        "`alexnet-grouped`, with the suffix `-224` or `-224-padded` for images of 224 pixels.",
    )
    pricing: Literal["ours", "paper"] = Field(
        default="ours",
        description="ours: the messages and bytes that this runtime sends, with sums in memory within a host. paper: equations 3 "
        "to 9 of Gholami et al.",
    )
    overlap: Annotated[Literal["none", "perfect"] | float, BeforeValidator(_overlap)] = Field(
        default="none",
        description="How much communication is hidden behind compute: `none`, `perfect`, or the fraction (0 to 1) of the compute "
        "time that was measured to hide communication.",
    )
    word_bytes: int = Field(default=4, ge=1, le=16, description="Bytes per weight, and per element of activations.")
    memory: Memory | None = Field(default=None, description="The most memory that a process may need. Default: no limit.")
    optimizer_words: int = Field(
        default=1, ge=0, le=16, description="Numbers that the optimizer keeps per weight: 1 for momentum, 2 for Adam."
    )
    flops: float = Field(
        default=NOMINAL_FLOPS,
        ge=0,
        le=1e18,
        description="Multiplications and additions per second of a process, for layers without a profiled time. 0: these layers "
        "take no time, so that communication alone is compared.",
    )
    activations: Literal["after_pooling", "before_pooling"] = Field(
        default="after_pooling",
        description="For a table of layers: whether outputs travel after pooling or before it.",
    )
    biases: bool = Field(default=False, description="For a table of layers: whether biases count as weights.")
    dx: bool = Field(
        default=True,
        description="pricing = paper: whether to count the sums of input gradients, as the equations do.",
    )
    processes: Annotated[tuple[Count, ...], BeforeValidator(_tuple)] = Field(
        default=(), description="Group sizes to plan for, one after another. Default: `[compute] group_size`."
    )

    @property
    def overlap_share(self) -> float:
        """The share of the compute time that hides communication, from 0 to 1."""
        if isinstance(self.overlap, float):
            return self.overlap
        return 1.0 if self.overlap == "perfect" else 0.0
