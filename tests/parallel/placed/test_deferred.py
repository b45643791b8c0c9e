"""Models made part by part have the bits of the ordinary construction, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from tests.parallel.placed.vision import made
from zmqtrain.parallel.deferred import CannotDeferError, Deferred, Tape, deferred, fill

Make = Callable[[], nn.Module]
#: So that all tensors but the smallest are deferred.
SMALLEST = 64


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    kinds = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor for kind in kinds for name, tensor in kind}


def later(make: Make) -> tuple[nn.Module, int]:
    """The model made part by part, and how many of its tensors were deferred."""
    torch.manual_seed(3)
    with deferred(Tape(SMALLEST)) as tape:
        model = make()
    tape.require(model)
    return model, len(fill(model, tape, lambda name, whole: whole))


def check(make: Make) -> nn.Module:
    """The model made part by part, which equals the ordinary one and has drawn as many numbers."""
    torch.manual_seed(3)
    ordinary, state = make(), torch.get_rng_state()
    model, count = later(make)
    assert count
    assert torch.equal(torch.get_rng_state(), state)
    expected, found = tensors_of(ordinary), tensors_of(model)
    assert list(expected) == list(found)
    for name, tensor in expected.items():
        assert type(found[name]) is type(tensor), name
        assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride()), name
        assert found[name].requires_grad == tensor.requires_grad, name
        assert torch.equal(found[name], tensor), name
    assert len(list(ordinary.parameters())) == len(list(model.parameters()))  # what was tied is tied
    return model


class Changed(nn.Module):
    """A linear layer, whose constructor ends with something else."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 30)
        change(self)


def tied() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(50, 16, padding_idx=0), "out": nn.Linear(16, 50, bias=False)})
    model["out"].weight = model["embedding"].weight
    return model.apply(lambda each: nn.init.normal_(each.weight, 0, 0.02) if hasattr(each, "weight") else None)


TORCH: dict[str, Make] = {
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "lstm": lambda: nn.LSTM(8, 16, 2),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose1d(4, 5, 3)),
    "tied": tied,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(20, 30)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(20, 30)),
    "old spectral_norm": lambda: spectral_norm(nn.Linear(20, 30)),
}


@pytest.mark.parametrize("name", TORCH)
def test_torchs_layers(name: str) -> None:
    check(TORCH[name])


@pytest.mark.parametrize("name", ["orthogonal_", "trunc_normal_", "xavier_normal_", "kaiming_uniform_", "eye_", "sparse_"])
def test_ways_to_begin(name: str) -> None:
    arguments = (0.3,) if name == "sparse_" else ()
    check(lambda: Changed(lambda it: getattr(nn.init, name)(it.layer.weight, *arguments)))


def _numbers() -> Any:
    return np.arange(600, dtype=np.float32).reshape(30, 20)


def _copied_and_changed(it: Changed) -> None:
    numbers = _numbers()
    it.layer.weight.data.copy_(torch.from_numpy(numbers))
    numbers *= 0


def _drawn_in_part(it: Changed) -> None:
    it.layer.weight.data[3:5] = torch.randn(2, 20)
    it.layer.weight.data.bernoulli_(it.layer.weight.data.abs().clamp(0, 1))


def _buffers(it: Changed) -> None:
    it.register_buffer("mask", torch.tril(torch.ones(40, 40)).view(1, 1, 40, 40))
    it.register_buffer("positions", torch.arange(500).expand(2, -1), persistent=False)


def _loaded(it: Changed) -> None:
    it.layer.load_state_dict({"weight": torch.from_numpy(_numbers()), "bias": torch.ones(30)})


def _called(it: Changed) -> None:
    with torch.no_grad():
        it.layer(torch.zeros(2, 20))


CHANGES: dict[str, Callable[[Any], object]] = {
    "values of numpy": _copied_and_changed,
    "a parameter of numpy's memory": lambda it: setattr(it.layer, "weight", nn.Parameter(torch.from_numpy(_numbers()))),
    "divided by its largest element": lambda it: it.layer.weight.data.div_(it.layer.weight.data.max().item()),
    "data set to what is computed": lambda it: setattr(it.layer.weight, "data", it.layer.weight.data * 2 + torch.randn(30, 20)),
    "a second name": lambda it: setattr(it, "alias", it.layer.weight),
    "another type": lambda it: it.half().to(torch.bfloat16),
    "frozen": lambda it: it.double().requires_grad_(False),
    "some rows drawn": _drawn_in_part,
    "buffers": _buffers,
    "a state dict": _loaded,
    "another order in memory": lambda it: setattr(it.layer.weight, "data", it.layer.weight.data.t().contiguous().t()),
    "a generator of its own": lambda it: it.layer.weight.data.uniform_(generator=torch.Generator().manual_seed(3)),
    "a transposition in place": lambda it: it.layer.weight.data.t_(),
    "a forward": _called,
    "seeds of its own": lambda it: (torch.manual_seed(7), it.layer.reset_parameters()),
    "numbers as a list": lambda it: setattr(it, "numbers", it.layer.bias.tolist()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_constructors_do(name: str) -> None:
    check(lambda: Changed(CHANGES[name]))


def test_attributes_of_modules_and_of_parameters() -> None:
    def change(it: Changed) -> None:
        it.table = torch.randn(30, 20)
        it.layer.weight.decays = False  # type: ignore[attr-defined]

    model = check(lambda: Changed(change))
    torch.manual_seed(3)
    assert torch.equal(model.table, Changed(change).table)  # type: ignore[arg-type]
    assert model.layer.weight.decays is False  # type: ignore[union-attr]


REFUSED: dict[str, Callable[[Any], object]] = {
    "a list of parameters": lambda it: setattr(it, "kept", [it.layer.weight]),
    "a closure over one": lambda it: setattr(it, "kept", (lambda weight: lambda: weight)(it.layer.weight)),
    "a hook": lambda it: it.layer.weight.register_hook(print),
    "old weight_norm": lambda it: weight_norm(it.layer),
    "pruning": lambda it: prune.l1_unstructured(it.layer, "weight", 0.3),
    "data set to numpy's memory": lambda it: setattr(it.layer.weight, "data", torch.from_numpy(_numbers())),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_what_cannot_be_made_later_is_refused(name: str) -> None:
    with pytest.raises(CannotDeferError):
        later(lambda: Changed(REFUSED[name]))


def test_a_refusal_that_the_constructor_catches_is_one() -> None:
    def change(it: Changed) -> None:
        try:
            it.layer.weight.data = torch.from_numpy(_numbers())
        except Exception:  # noqa: BLE001 - as people do
            return

    with pytest.raises(CannotDeferError):
        later(lambda: Changed(change))


def test_small_tensors_are_ordinary() -> None:
    with deferred(Tape(2400)) as tape:
        model = nn.Linear(20, 30)
    tape.require(model)
    assert isinstance(model.weight, Deferred)
    assert type(model.bias) is nn.Parameter


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "efficientnet_b0", "convnext_tiny", "vit_b_16", "swin_t"])
def test_torchvision(name: str) -> None:
    check(lambda: made(name))


SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 40}),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 64, "d_kv": 16}),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, config, sizes = HUGGING_FACE[name]
    check(lambda: getattr(transformers, model)(getattr(transformers, config)(vocab_size=100, **sizes)))
