"""The layers of any model, found by one forward on tensors without content, observed by hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from zmqtrain.errors import UsageError
from zmqtrain.parallel.domain.make import HALO, LOCAL
from zmqtrain.parallel.placed.pairs import pairs, transposed
from zmqtrain.plan.layers import DIVISIBLE, INPUT, Branch, Kind, LayerShape, Meeting, Pair, Source, Weights

#: Samples of the traced forward: the fewest that batch norm allows in training.
SAMPLES = 2
_NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
#: Those with means over groups of channels of a sample.
_MEANS = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_POOLS = (_AvgPoolNd, _MaxPoolNd, _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd)
#: Modules with submodules that count as one layer, because they are divided as one.
_ONE_LAYER = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
#: Layers without weights that work on some channels in the same way as on all.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_BY_CHANNEL = (*(LOCAL - {nn.PReLU, nn.LocalResponseNorm, nn.Softmax2d, nn.ChannelShuffle}), *_DROPOUTS, *HALO, nn.Flatten)


@dataclass(slots=True)
class _Call:
    name: str
    module: nn.Module
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    source: Source


def trace_layers(model: nn.Module, inputs: Sequence[Any], *, devices: Sequence[str] = ("meta", "cpu")) -> tuple[LayerShape, ...]:
    """The model's layers in the order in which ``model(*inputs)`` calls them. ``inputs``: those of a batch, samples first.

    Names are those of `named_modules`. A layer that is called more than once is one layer, with the source of its first input. Of
    what is not a module (functions, sums of branches) only what meets there is seen: activations are counted as modules return
    them. Nothing is computed if the model can run on torch's
    meta tensors; otherwise two samples run for real, if ``devices`` has ``cpu``. Raises `UsageError` if the forward fails, or calls
    no layer with weights.
    """
    training = model.training
    try:
        calls = _run(model, inputs, SAMPLES, devices)
    finally:
        model.train(training)
    found: dict[str, LayerShape] = {}
    for call in calls:
        if call.name in found:
            found[call.name] = replace(found[call.name], calls=found[call.name].calls + 1)
        else:
            found[call.name] = _layer(call)
    for pair in pairs(model):
        if pair.keys() <= found.keys():
            last = next(name for name, divided in pair.items() if divided.by == "inputs")
            found |= {name: replace(found[name], pair=Pair(last, divided)) for name, divided in pair.items()}
    if not any(layer.weights for layer in found.values()):
        raise UsageError(f"the forward of {type(model).__name__} calls no layer with weights, so there is nothing to plan")
    return tuple(found.values())


def _run(model: nn.Module, inputs: Sequence[Any], samples: int, devices: Sequence[str]) -> list[_Call]:
    first = [_map(one, lambda tensor: tensor[:samples]) for one in inputs]
    error: Exception | None = None
    for device in devices:
        # The very same parameters are put back afterwards.
        with _on(model, device), torch.no_grad():
            calls: list[_Call] = []
            sources = Sources()
            watches = list(_watch(model, calls, sources))
            try:
                given = [_map(one, lambda tensor, to=device: tensor.to(to)) for one in first]
                with sources:
                    model(*given)
                return calls
            except Exception as failed:  # noqa: BLE001 - raised by the model's code; it may need values, so it is run again for real
                error = failed
            finally:
                for watch in watches:
                    watch.remove()
    assert error is not None
    raise UsageError(f"the forward of {type(model).__name__} raised {type(error).__name__}: {error}") from error


class Sources(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active: which layer each tensor comes from, also through functions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: MutableMapping[Tensor, Source] = WeakTensorKeyDictionary()
        self.modules: list[str] = []
        """The module whose forward runs, within those around it."""

    def of(self, tensors: Sequence[Tensor]) -> Source:
        """The source of one, or of several that meet here."""
        found: dict[Source, Branch] = {}
        for tensor in tensors:
            source = self.known.get(tensor)
            if source is not None:
                found.setdefault(source, Branch(source, tensor.numel() // SAMPLES))
        if len(found) == 1:
            return next(iter(found))
        return Meeting(tuple(found.values()), self.modules[-1] if self.modules else "") if found else INPUT

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        source = self.of(_tensors((args, kwargs or {})))
        output = func(*args, **(kwargs or {}))
        if source != INPUT:
            for tensor in _tensors(output):
                self.known[tensor] = source
        return output


def _watch(model: nn.Module, calls: list[_Call], sources: Sources) -> Iterator[RemovableHandle]:
    """Hooks on all modules, of which those count as layers that have weights of their own or no submodules."""

    def around(name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        def enter(_module: nn.Module, _given: Any) -> None:
            sources.modules.append(name)

        def leave(_module: nn.Module, _given: Any, _output: Any) -> None:
            sources.modules.pop()

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave)

    def hook(name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        begun: list[Source] = []  # before a layer changes its input in place

        def begin(_module: nn.Module, given: tuple[Any, ...]) -> None:
            begun.append(sources.of(_tensors(given)))

        def called(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            source, target, origin = _first(given), _first(output), begun.pop()
            if source is not None and target is not None:
                turned = isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
                # What has no weights is often called at several places: its output is then of what it was given there.
                again = not any(True for _ in module.parameters()) and any(call.module is module for call in calls)
                calls.append(_Call(name, module, _sample(source, turned), _sample(target, turned), origin))
                for tensor in _tensors(output):
                    sources.known[tensor] = origin if again else name

        yield module.register_forward_pre_hook(begin)
        yield module.register_forward_hook(called)

    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        yield from around(name, module)
        if module in inside:
            continue
        if isinstance(module, _ONE_LAYER):  # attention uses its output layer's weights without calling that layer
            inside.update(module.modules())
        elif any(True for _ in module.children()) and not any(True for _ in module.parameters(recurse=False)):
            continue
        yield from hook(name, module)


def _layer(call: _Call) -> LayerShape:
    module = call.module
    whole = isinstance(module, _ONE_LAYER)
    weights = sum(parameter.numel() for parameter in module.parameters(recurse=whole))
    shape = LayerShape(call.name, _kind(module, weights), call.inputs, call.outputs, weights, source=call.source)
    matrices = sum(parameter.numel() for parameter in module.parameters(recurse=whole) if parameter.dim() > 1)
    positions = 1
    for size in call.outputs[1:] if isinstance(module, _ConvNd) else call.outputs[:-1]:
        positions *= size
    if isinstance(module, nn.Embedding):
        matrices = 0
    if isinstance(module, _ConvTransposeNd):  # each input is multiplied by all weights; in others each output is made from them
        positions = shape.numel_in // call.inputs[0]
    elementwise = 0 if shape.kind == "own" else shape.numel_out
    shape = replace(
        shape,
        flops=2 * matrices * positions if shape.kind in _MULTIPLIES else elementwise,
        statistics=isinstance(module, _BatchNorm),
        means=_means(module, call.inputs),
        running=isinstance(module, _MEANS) and getattr(module, "running_mean", None) is not None,
        mixes=shape.kind not in (*DIVISIBLE, "own") and not isinstance(module, (_BatchNorm, *_MEANS, *_BY_CHANNEL)),
        **_attention(module),
    )
    if isinstance(module, nn.RNNBase):
        return replace(shape, rounds=call.outputs[0] * module.num_layers)
    if shape.image and isinstance(module, _AdaptiveAvgPoolNd | _AdaptiveMaxPoolNd):
        window = (call.inputs[1] // call.outputs[1], call.inputs[2] // call.outputs[2])
        return replace(shape, kernel=window, stride=window, adaptive=True)
    if shape.image and isinstance(module, _ConvNd | _AvgPoolNd | _MaxPoolNd):
        return replace(
            shape,
            kernel=_pair(module.kernel_size),
            stride=_pair(module.stride),
            padding=(0, 0) if isinstance(module.padding, str) else _pair(module.padding),
            dilation=_pair(getattr(module, "dilation", 1)),
            transposed=isinstance(module, _ConvTransposeNd),
            groups=getattr(module, "groups", 1),
        )
    return shape


def _means(module: nn.Module, inputs: tuple[int, ...]) -> int:
    """The number of groups of channels of which a norm needs means."""
    if isinstance(module, nn.GroupNorm):
        return module.num_groups
    return inputs[0] if isinstance(module, _MEANS) else 0


def _attention(module: nn.Module) -> dict[str, Any]:
    """What heads divide: of attention alone, or of a transformer layer as a whole."""
    if isinstance(module, nn.TransformerEncoder):
        layers = [_attention(layer) for layer in module.layers]
        heads = min((layer["heads"] for layer in layers), default=0)
        pieces = [piece for layer in layers for piece in layer["pieces"]]
        return {"heads": heads, "sums": sum(layer["sums"] for layer in layers), "pieces": tuple(pieces)}
    if isinstance(module, nn.TransformerEncoderLayer):
        inner, hidden = _attention(module.self_attn), module.linear1.out_features
        pieces = [*inner["pieces"], Weights(hidden, _numel(module.linear1) // hidden)]
        pieces.append(Weights(hidden, module.linear2.out_features, _whole(module.linear2)))
        pieces += [Weights(whole=_numel(norm)) for norm in (module.norm1, module.norm2)]
        return {"heads": inner["heads"], "sums": 2, "pieces": tuple(pieces)}
    if isinstance(module, nn.MultiheadAttention):
        heads, out = module.num_heads, module.out_proj
        inputs = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        pieces = [Weights(heads, inputs // heads), Weights(heads, out.weight.numel() // heads, _whole(out))]
        return {"heads": heads, "sums": 1, "pieces": tuple(pieces)}
    return {}


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _whole(module: nn.Linear) -> int:
    """The number of biases, which are whole if inputs are divided."""
    return 0 if module.bias is None else module.bias.numel()


_MULTIPLIES: tuple[Kind, ...] = ("conv", "linear", "recurrent", "attention", "encoder")


def _kind(module: nn.Module, weights: int) -> Kind:
    match module:
        case nn.Linear():
            return "linear"
        case nn.Embedding():
            return "embedding"
        case nn.RNNBase():
            return "recurrent"
        case nn.MultiheadAttention():
            return "attention"
        case nn.TransformerEncoder() | nn.TransformerEncoderLayer():
            return "encoder"
    if isinstance(module, _ConvNd):
        return "conv"
    if transposed(module):
        return "linear"
    if isinstance(module, _NORMS):
        return "norm"
    if isinstance(module, _POOLS):
        return "pool"
    return "own" if any(True for _ in module.children()) else "other"


@contextmanager
def _on(model: nn.Module, device: str) -> Iterator[None]:
    """A context in which the model's parameters and buffers are on another device; layers see them as their own."""
    if device == "cpu":
        yield
        return
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    kept.append((table, name, tensor))
    flat = {id(tensor): tensor.detach().to(device) for _, _, tensor in kept}
    try:
        for table, name, tensor in kept:
            moved = flat[id(tensor)]
            table[name] = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
        yield
    finally:
        for table, name, tensor in kept:
            table[name] = tensor


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_map(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    return value


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in ``value``."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _first(value: Any) -> Tensor | None:
    """The first tensor in ``value``."""
    return next(iter(_tensors(value)), None)


def _sample(tensor: Tensor, turned: bool) -> tuple[int, ...]:
    """The shape of one sample. ``turned``: positions come before samples."""
    shape = tuple(tensor.shape)
    rest = (shape[0], *shape[2:]) if turned and len(shape) > 2 else shape[1:]
    return rest or (1,)


def _pair(value: Any) -> tuple[int, int]:
    """A setting for height and width."""
    if isinstance(value, tuple):
        return (int(value[0]), int(value[-1]))
    return (int(value), int(value))
