"""Linear layers that follow one another within a model's attention and MLPs, found by the names that modules give them.

The first of a pair is divided by outputs, attention's by heads, and the last by its inputs, as the first leaves them: so the two
cost one sum of activations. This is a guess of what a forward does: where it is wrong it costs messages, and results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from zmqtrain.parallel.paired import Paired

#: What models call the layer that takes what others of the same module have made.
_LAST = ("o_proj", "out_proj", "o", "out_lin", "wo", "down_proj", "fc2", "c_proj", "lin2", "w2", "dense_4h_to_h")
#: Queries, keys and values.
_ATTENTION = (
    *({"q_proj", "k_proj", "v_proj"}, {"q", "k", "v"}, {"query", "key", "value"}, {"q_lin", "k_lin", "v_lin"}),
    *({"c_attn"}, {"q_attn", "c_attn"}),
)
#: What makes several of them at once.
_PACKED = "c_attn"
#: Modules side by side: of the first one's layers, and of the other's.
_BESIDE = (("self", "output"), ("attention", "output"), ("intermediate", "output"))
_HEAD = ("head_dim", "attention_head_size", "key_value_proj_dim")
_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head")


def sizes(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer, or of one whose weight is transposed (`transposed`); ``None`` of others."""
    if transposed(module):
        inputs, outputs = module.weight.shape  # type: ignore[misc]
        return int(inputs), int(outputs)
    return (module.in_features, module.out_features) if type(module) is nn.Linear else None


def transposed(module: nn.Module) -> bool:
    """Whether it is the layer of GPT-2 and its like, a product with a weight of (inputs, outputs)."""
    weight = module._parameters.get("weight")  # what a parametrization makes would be made once more, and may count
    return type(module).__name__ == "Conv1D" and isinstance(weight, nn.Parameter) and weight.dim() == 2


def pairs(model: nn.Module) -> Iterator[dict[str, Paired]]:
    """The layers of each pair, by name."""
    for name, module in model.named_modules():
        children = {each: size for each, child in module.named_children() if (size := sizes(child)) is not None}
        prefix = f"{name}." if name else ""
        last = next((each for each in reversed(children) if each in _LAST), None)
        if last is not None and not isinstance(module, nn.Sequential):
            yield from _pair(
                module, {f"{prefix}{each}": size for each, size in children.items()}, f"{prefix}{last}", children[last]
            )
        for first, other in _BESIDE:
            one, two = getattr(module, first, None), getattr(module, other, None)
            if not isinstance(one, nn.Module) or not isinstance(two, nn.Module):
                continue
            own = {each: size for each, child in one.named_children() if (size := sizes(child)) is not None}
            after = sizes(getattr(two, "dense", None) or two)
            if own and after is not None and (first == "intermediate" or set(own) in _ATTENTION):
                named = {f"{prefix}{first}.{each}": size for each, size in own.items()}
                yield from _pair(one, named, f"{prefix}{other}.dense", after)


def _pair(around: nn.Module, layers: dict[str, tuple[int, int]], last: str, after: tuple[int, int]) -> Iterator[dict[str, Paired]]:
    before = {name: size[1] for name, size in layers.items() if name != last}
    attention = {name.rpartition(".")[2] for name in before} in _ATTENTION
    head = _head(around, after[0]) if attention else 1
    if head is None:
        return
    packs = {name: size // after[0] if attention and name.endswith(f".{_PACKED}") and size % after[0] == 0 else 1
             for name, size in before.items()}  # fmt: skip
    before = {name: size // packs[name] for name, size in before.items()}
    if not attention:  # what is made for something else stays as it is
        before = {name: outputs for name, outputs in before.items() if outputs == after[0]}
    widths = [*before.values(), after[0]]
    fewest = min(widths) // head
    if not before or any(width % head or (width // head) % fewest for width in widths):
        return
    yield {
        **{name: Paired("outputs", outputs // head, head, fewest, packs[name]) for name, outputs in before.items()},
        last: Paired("inputs", after[0] // head, head, fewest),
    }


def _head(around: nn.Module, features: int) -> int | None:
    """Features of a head."""
    for name in _HEAD:
        if isinstance(found := getattr(around, name, None), int):
            return found
    counts = (getattr(around, name, None) for name in _HEADS)
    return next((features // each for each in counts if isinstance(each, int) and features % each == 0), None)
