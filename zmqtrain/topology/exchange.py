"""``[exchange]``: how the groups agree on parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from zmqtrain.topology.averaging import Averaging
from zmqtrain.topology.gossip import Gossip
from zmqtrain.topology.section import MOST, ByteSize, Section


class Bound(Section):
    """Stale synchronous parallel: no group is ever more than ``bound`` steps ahead of the slowest."""

    bound: int = Field(ge=0, le=2**31, description="Steps that a group may be ahead of the slowest; 0 keeps them in step.")


def _staleness(value: Any) -> Any:
    if isinstance(value, Bound | dict) or value in ("async", "sync"):
        return value
    raise ValueError('is no staleness: write "async", "sync" or { bound = 4 }')


class ExchangeSection(Section):
    """How groups agree on parameters."""

    kind: Literal["allreduce", "model_server", "gossip", "averaging"] = Field(
        default="allreduce",
        description="allreduce: all groups in step, gradients averaged. model_server: servers hold the parameters and optimize. "
        "gossip: each step every group averages with one other. averaging: groups train alone and average their models every "
        "`every` steps. Default: allreduce for one group (so also where nothing is said of groups), else model_server.",
    )
    staleness: Annotated[
        Annotated[Literal["async", "sync"], Tag("word")] | Annotated[Bound, Tag("table")],
        Discriminator(lambda value: "word" if isinstance(value, str) else "table"),
        BeforeValidator(_staleness),
    ] = Field(
        default="async",
        description="For model servers. async: each group's gradient is applied when it arrives. sync: once all groups' are there. "
        "{ bound = n }: on arrival, but no group gets more than n steps ahead of the slowest.",
    )
    shards: int = Field(default=1, ge=1, le=4096, description="Model servers; each holds a part of the model, even by bytes.")
    snapshot: bool = Field(default=False, description="Every read of the parameters is of one version throughout.")
    every: Annotated[int, Field(ge=1, le=MOST)] | Literal["log p"] = Field(
        default=1,
        description="averaging: steps between averagings. allreduce: steps whose gradients are added up before they are exchanged "
        "and the optimizer runs. `log p`: the logarithm (base 2, rounded up) of the number of groups.",
    )
    averaging: Averaging = Field(default_factory=Averaging, description="How groups that train alone come together.")
    gossip: Gossip = Field(default_factory=Gossip, description="What gossip exchanges, and with whom.")
    split_size: ByteSize = Field(default=4 * 2**20, description="Larger tensors are cut into pieces of at most this size.")
    compression: Literal["none", "fp16", "bf16", "int8", "topk"] = Field(
        default="none", description="For model servers: how gradients are compressed on the wire."
    )
    compression_ratio: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="For topk: the share of a gradient's elements that is sent; the others wait.",
    )
    merged_fc: bool = Field(
        default=False,
        description="For model servers. One FC server holds the fully connected layers and computes them for all groups: workers "
        "send it activations, and get their gradients. The other layers stay on the model servers.",
    )
    split: str | None = Field(
        default=None,
        min_length=1,
        description="merged_fc: the module of the model (or layer of the profile) with which the FC server's part begins. Default: "
        "the first linear layer behind the last convolution; behind recurrent layers or attention, the last linear layer.",
    )
    fc_servers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="merged_fc: processes of the FC server. Several divide its layers among them, each layer by its outputs.",
    )

    @property
    def split_bytes(self) -> int:
        """The largest piece in bytes."""
        return self.split_size

    def every_steps(self, groups: int) -> int:
        """Steps from one exchange to the next, among so many groups."""
        return max(1, (groups - 1).bit_length()) if self.every == "log p" else self.every

    @property
    def policy(self) -> Literal["async", "sync", "bound"]:
        """The staleness policy's name."""
        return "bound" if isinstance(self.staleness, Bound) else self.staleness

    @property
    def bound(self) -> int | None:
        """How many steps a group may be ahead of the slowest; ``None`` where nothing limits it, 0 for ``sync``."""
        if isinstance(self.staleness, Bound):
            return self.staleness.bound
        return 0 if self.staleness == "sync" else None
