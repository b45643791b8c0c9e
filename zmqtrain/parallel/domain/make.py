"""Which divided layer stands for which layer of torch, and what it will send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor, nn

from zmqtrain.errors import UsageError
from zmqtrain.events import Recorder
from zmqtrain.parallel.communicator import Communicator, Expected, Label, Pending
from zmqtrain.parallel.domain.adaptive import DomainAdaptiveAvgPool, DomainAdaptiveMaxPool, DomainGlobalPool, output_size
from zmqtrain.parallel.domain.axes import FIRST
from zmqtrain.parallel.domain.batch_norm import DomainBatchNorm2d
from zmqtrain.parallel.domain.convolution import DomainConv, DomainConvTranspose
from zmqtrain.parallel.domain.layer import Across, DomainLayer
from zmqtrain.parallel.domain.padding import DomainPad, Pad
from zmqtrain.parallel.domain.pooling import DomainAvgPool, DomainMaxPool
from zmqtrain.parallel.domain.traffic import Collective, LayerTraffic
from zmqtrain.parallel.domain.upsample import DomainUpsample, Resize
from zmqtrain.parallel.geometry import Count, Division, halo_traffic
from zmqtrain.parallel.halo import HEIGHT

#: Layers that need rows of others.
HALO: dict[type[nn.Module], type[DomainLayer]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), DomainConv),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), DomainConvTranspose),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), DomainMaxPool),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), DomainAvgPool),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), DomainAdaptiveAvgPool),
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), DomainAdaptiveMaxPool),
    Pad: DomainPad,
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, Resize), DomainUpsample),
}
#: Layers that compute each place of an image by itself: they are the same on a strip.
LOCAL: frozenset[type[nn.Module]] = frozenset(
    {
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
        *(nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Softsign, nn.Tanhshrink),
        *(nn.Threshold, nn.Softshrink, nn.Hardshrink),
        *(nn.Identity, nn.LocalResponseNorm, nn.Softmax2d, nn.ChannelShuffle),
    }
)


def domain_layer(
    module: nn.Module,
    name: str,
    communicator: Communicator,
    division: Division,
    *,
    statistics: Communicator | None = None,
    outputs: Division | None = None,
    dim: int = HEIGHT,
    across: Across | None = None,
    recorder: Recorder | None = None,
) -> tuple[nn.Module, Division | None]:
    """The layer that does on strips what ``module`` does on images, and the division of its output.

    Arguments:
        communicator: of the processes that divide the image along ``dim``.
        division: of the input.
        statistics: over whom batch norm takes its statistics; ``None`` for each strip by itself.
        outputs: the division of the output; by default the one that follows the input's.
        across: a second dimension that is divided; then the layer says of its output's (`DomainLayer.out_across`).

    The division returned is ``None`` where each member has the whole output (pooling to one row). A layer that computes each place
    by itself is returned as it is. Raises `UsageError`, which names the layer, for one that cannot be divided.
    """
    kind = type(module)
    if kind in LOCAL:
        return module, division
    if kind is nn.BatchNorm2d:
        norm = DomainBatchNorm2d(module, name, communicator, division, statistics=statistics, dim=dim, recorder=recorder)
        return norm, norm.out_division
    if across is None and _to_one_row(module, dim):
        pool = DomainGlobalPool(module, name, communicator, division, dim=dim, recorder=recorder)
        return pool, None
    if kind not in HALO:
        raise UsageError(f"{name}: {kind.__name__} cannot be divided along the image")
    layer = HALO[kind](module, name, communicator, division, outputs=outputs, dim=dim, across=across, recorder=recorder)
    return layer, layer.out_division


def _to_one_row(module: nn.Module, dim: int) -> bool:
    """Whether it pools to one row, which can be made of what each member makes of its own.

    Of a maximum along another dimension than the first the members alone do not say which of equal numbers is torch's choice.
    """
    kind = HALO.get(type(module))
    if kind is DomainAdaptiveMaxPool and dim != FIRST:
        return False
    return kind in (DomainAdaptiveAvgPool, DomainAdaptiveMaxPool) and output_size(module)[dim - FIRST] == 1


def domain_traffic(
    module: nn.Module,
    division: Division,
    shape: Sequence[int],
    element_size: int,
    *,
    outputs: Division | None = None,
    dim: int = HEIGHT,
    input_gradient: bool = True,
    name: str = "layer",
    local_statistics: bool = False,
) -> LayerTraffic:
    """What each member sends in one step of a layer, as the wire will count it; nothing is sent and nothing computed.

    Arguments:
        division: of the input. As many members as it has strips divide the image.
        shape: of the whole input (samples, channels, height, width), with a column's samples.
        element_size: bytes of a number.
        input_gradient: whether the layer's input needs a gradient, which the first one's does not.
        local_statistics: whether batch norm takes those of each strip by itself.
    """
    silent = _Silent(len(division))
    layer, out_division = domain_layer(
        module, name, silent, division, statistics=None if local_statistics else silent, outputs=outputs, dim=dim
    )
    nothing = (Count(0, 0),) * len(division)
    if isinstance(layer, DomainLayer):
        row_bytes = element_size
        for axis, size in enumerate(shape):
            row_bytes *= 1 if axis == dim else size
        assert out_division is not None
        halo = halo_traffic(layer.geometry, division, out_division, row_bytes, input_gradient=input_gradient)
        return LayerTraffic(out_division, halo, ())
    collectives: tuple[Collective, ...] = ()
    if isinstance(layer, DomainBatchNorm2d | DomainGlobalPool):
        collectives = tuple(layer.collectives(shape, element_size, input_gradient))
    return LayerTraffic(out_division, {"forward": nothing, "backward": nothing}, collectives)


class _Silent:
    """A communicator that sends nothing, and only says how many members there are."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Expected], label: Label) -> Pending:
        return self._refuse(label)

    def all_gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]], label: Label) -> Pending:
        return self._refuse(label)

    def all_reduce(self, tensor: Tensor, label: Label) -> Pending:
        return self._refuse(label)

    def reduce_scatter(self, parts: Sequence[Tensor], label: Label) -> Pending:
        return self._refuse(label)

    def _refuse(self, label: Label) -> NoReturn:
        raise AssertionError(f"{label}: this layer was made to be asked, not to compute")
