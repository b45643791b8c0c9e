"""``[exchange]``: how the groups agree on parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from zmqtrain.topology.averaging import Averaging
from zmqtrain.topology.gossip import Gossip
from zmqtrain.topology.section import MOST, ByteSize, Section


class Bound(Section):
    """Stale synchronous parallel: no group ever gets more than ``bound`` steps ahead of the slowest."""

    bound: int = Field(ge=0, le=2**31, description="Steps that a group may be ahead of the slowest; 0 keeps them in step.")


def _staleness(value: Any) -> Any:
    if isinstance(value, Bound | dict) or value in ("async", "sync"):
        return value
    raise ValueError('must be "async", "sync" or a bound like { bound = 4 }')


class ExchangeSection(Section):
    """How groups agree on parameters."""

    kind: Literal["allreduce", "model_server", "gossip", "averaging"] = Field(
        default="allreduce",
        description="allreduce: all groups work in step, and gradients are averaged. model_server: servers hold the parameters "
        "and run the optimizer. gossip: at each step every group averages with one other. averaging: groups train "
        "alone and average their models every `every` steps. Default: allreduce for one group (or if the file does "
        "not mention groups), otherwise model_server.",
    )
    staleness: Annotated[
        Annotated[Literal["async", "sync"], Tag("word")] | Annotated[Bound, Tag("table")],
        Discriminator(lambda value: "word" if isinstance(value, str) else "table"),
        BeforeValidator(_staleness),
    ] = Field(
        default="async",
        description="For model servers. async: a group's gradient is applied as soon as it arrives. sync: gradients are applied "
        "once those of all groups have arrived. { bound = n }: as for async, but no group gets more than n steps "
        "ahead of the slowest.",
    )
    shards: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Number of model servers. Each holds a part of the model; the parts are equal in bytes.",
    )
    replicas: int = Field(
        default=0,
        ge=0,
        le=1,
        description="For elastic runs of tasks with model servers: on how many other servers each shard (parameters, optimizer "
        "state, and which gradients it has applied) is kept, too, on another host where there is one. With 1, a gradient counts "
        "once both servers have it; when a server is lost, the other one serves its shard at once, and the next copy is made "
        "while training goes on. With merged_fc, a second FC server has a copy of the merged layers. 0: a lost server ends the "
        "run.",
    )
    max_servers: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="For model servers whose shards may move (`replicas`, or `[job] elastic = true`): how many servers there may "
        "be. Beyond the `shards` servers with which the run begins, others come on machines that join while it trains "
        "(`zmqtrain join RUN`), and get shards, or copies of them. Default: no others.",
    )
    snapshot: bool = Field(default=False, description="Every read of the parameters returns a single version of the whole model.")
    every: Annotated[int, Field(ge=1, le=MOST)] | Literal["log p"] = Field(
        default=1,
        description="averaging: steps from one averaging to the next. allreduce: steps whose gradients are accumulated before "
        "they are exchanged and the optimizer runs. `log p`: the logarithm of the number of groups (base 2, rounded "
        "up).",
    )
    averaging: Averaging = Field(default_factory=Averaging, description="How groups that train alone combine their models.")
    gossip: Gossip = Field(default_factory=Gossip, description="What gossip exchanges, and with whom.")
    split_size: ByteSize = Field(
        default=4 * 2**20,
        description="For model servers: the largest piece of a bucket. "
        "On several hosts, each bucket is divided evenly among all servers.",
    )
    compression: Literal["none", "auto", "fp16", "bf16", "int8", "sign", "topk", "powersgd"] = Field(
        default="none",
        description="For allreduce and model servers: how gradients are compressed on the wire. sign: one bit each. topk: the "
        "largest elements. powersgd: matrices as products of thin ones. What these three leave out is sent later. With model "
        "servers parameters come back as they are; with allreduce nothing else travels. auto: what `zmqtrain plan` recommends, "
        "decided before the run.",
    )
    compression_ratio: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="topk: the fraction of a gradient's elements that is sent; the others are carried over to later steps.",
    )
    compression_rank: int = Field(
        default=4,
        ge=1,
        le=64,
        description="powersgd: the rank of the matrices' factors. A higher one loses less of each step's gradient, and sends more.",
    )
    merged_fc: bool = Field(
        default=False,
        description="For model servers: one FC server holds the fully connected layers and computes them for all groups. Workers "
        "send it activations and receive the gradients of those. The other layers stay on the model servers.",
    )
    split: str | None = Field(
        default=None,
        min_length=1,
        description="merged_fc: the module of the model (or layer of the profile) at which the FC server's part begins. Default: "
        "the first linear layer after the last convolution; after recurrent layers or attention, the last linear "
        "layer.",
    )
    fc_servers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="merged_fc: number of FC server processes. If there are several, each layer is divided among them by its "
        "outputs.",
    )

    @property
    def split_bytes(self) -> int:
        """The size of the largest piece, in bytes."""
        return self.split_size

    def every_steps(self, groups: int) -> int:
        """Steps from one exchange to the next with ``groups`` groups."""
        return max(1, (groups - 1).bit_length()) if self.every == "log p" else self.every

    @property
    def policy(self) -> Literal["async", "sync", "bound"]:
        """The name of the staleness policy."""
        return "bound" if isinstance(self.staleness, Bound) else self.staleness

    @property
    def bound(self) -> int | None:
        """How many steps a group may be ahead of the slowest; ``None``: no limit; 0 for ``sync``."""
        if isinstance(self.staleness, Bound):
            return self.staleness.bound
        return 0 if self.staleness == "sync" else None
