"""Models of Hugging Face's transformers, as they are: what they compute divided is what they compute in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.parallel.shard import gather_state
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.testing.threads import ThreadFabric, run_ranks

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
transformers: Any = None

BATCH, STEPS, WORDS, LENGTH = 5, 2, 23, 6


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Not when tests are collected, which each process does: it takes a second, and one process runs these."""
    global transformers
    transformers = import_module("transformers")


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def words(length: int = LENGTH) -> Tensor:
    return torch.randint(2, WORDS, (BATCH, length), generator=_generator())


def padding(length: int = LENGTH) -> Tensor:
    """1 where there is a word; each sample has another number of them."""
    return (torch.arange(length) < torch.tensor([length - each % 3 for each in range(BATCH)])[:, None]).long()


def gpt2(attention: str) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=1, attn_implementation=attention,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(attention: str) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16, attn_implementation=attention,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def llama(attention: str) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=1, attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def vit(attention: str) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5, attn_implementation=attention,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def t5(attention: str) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=4, d_ff=20, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def whisper(attention: str) -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=6, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=20, decoder_ffn_dim=20, max_source_positions=8, max_target_positions=16,
        dropout=0.0, pad_token_id=0, bos_token_id=0, eos_token_id=1, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None, attn_implementation=attention,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def text() -> dict[str, Tensor]:
    mask = padding()
    return {"input_ids": words(), "attention_mask": mask, "labels": words().masked_fill(mask == 0, -100)}


def images() -> dict[str, Tensor]:
    pixels = torch.randn(BATCH, 3, 8, 8, generator=_generator(), dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(5, (BATCH,), generator=_generator())}


def translation() -> dict[str, Tensor]:
    return {"input_ids": words(), "attention_mask": padding(), "labels": words(4).masked_fill(padding(4) == 0, -100)}


def speech() -> dict[str, Tensor]:
    sound = torch.randn(BATCH, 6, 16, generator=_generator(), dtype=torch.float64)
    return {"input_features": sound, "labels": words(4).masked_fill(padding(4) == 0, -100)}


#: Name -> (model for a kind of attention, inputs).
MODELS: dict[str, tuple[Callable[[str], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "gpt2": (gpt2, text),
    "bert": (bert, text),
    "llama": (llama, text),
    "vit": (vit, images),
    "t5": (t5, translation),
    "whisper": (whisper, speech),
}
LAYERS = {"Linear", "Conv1D", "Conv1d", "Conv2d", "Embedding"}


def made(name: str, attention: str) -> nn.Module:
    torch.manual_seed(1)
    model = MODELS[name][0](attention).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def plan_of(model: nn.Module, choice: str, grid: Grid) -> Plan | None:
    if choice == "none":
        return None
    layers = [name for name, module in model.named_modules() if type(module).__name__ in LAYERS]
    return Plan(tuple(LayerPlan(name, choice, grid) for name in layers))  # type: ignore[arg-type]


def train(model: nn.Module, inputs: dict[str, Tensor], share: Callable[[], float], summed: Callable[[], None]) -> dict[str, Tensor]:
    """What there is to compare after some steps: losses, gradients, and the output in evaluation."""
    found: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(**inputs)
        # A loss that the model computes, and one that is computed of what it returns.
        target = torch.arange(output.logits.numel(), dtype=torch.float64).cos().view_as(output.logits)
        (output.loss * share() + (output.logits * target[:1]).sum() / BATCH).backward()
        summed()
        found[f"loss {step}"] = output.loss.detach()
        if step == 0:
            found |= {f"gradient {name}": each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        optimizer.step()
    return found


def one_process(name: str, attention: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, inputs = made(name, attention), MODELS[name][1]()
    found = train(model, inputs, lambda: 1.0, lambda: None)
    model.eval()
    with torch.no_grad():
        output = model(**inputs)
    found |= {"eval loss": output.loss, "eval output": output.logits}
    return found, model.state_dict()


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these models compute in float32 whatever their weights are, norms and losses, is computed in float64."""
    in_double(monkeypatch.setattr)


def in_double(setattr: Callable[[Any, str, Any], None]) -> None:
    def norm(self: Any, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))  # type: ignore[no-any-return]

    setattr(transformers.models.llama.modeling_llama.LlamaRMSNorm, "forward", norm)
    setattr(transformers.models.t5.modeling_t5.T5LayerNorm, "forward", norm)
    plain = Tensor.float
    setattr(Tensor, "float", lambda self: self if self.dtype == torch.float64 else plain(self))


def compare(name: str, attention: str, choice: str, grid: str) -> dict[str, str]:
    """All is as in one process. Returns what was computed on gathered tensors."""
    expected, state = one_process(name, attention)
    model, wanted = made(name, attention), Grid.parse(grid)

    def run(fabric: Fabric) -> Any:
        parallel = parallelize(copy.deepcopy(model), wanted, plan_of(model, choice, wanted), fabric=fabric)
        parallel.batch.size = BATCH
        start, stop = parallel.samples(BATCH)
        inputs = {key: value[start:stop] for key, value in MODELS[name][1]().items()}
        shards = parallel.shards_by_name()

        def share() -> float:
            mine = parallel.output_range()
            return (mine.stop - mine.start) / BATCH

        found = train(parallel, inputs, share, lambda: sum_gradients(parallel, fabric, shards))
        gradients = {key.removeprefix("gradient "): each for key, each in found.items() if key.startswith("gradient")}
        found |= {f"gradient {key}": each for key, each in gather_state(gradients, shards, fabric).items()}
        parallel.eval()
        with torch.no_grad():
            output = parallel(**inputs)
        mine = parallel.output_range()
        found |= {"eval loss": output.loss, "eval output": output.logits}
        return found, parallel.whole_state(), slice(start + mine.start, start + mine.stop), dict(parallel.left_whole)

    results, _ = run_ranks(wanted.size, run)
    for found, whole, mine, _ in results:
        for key, value in expected.items():
            there = value[mine] if key == "eval output" else value
            torch.testing.assert_close(found[key], there, rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}")
        assert found.keys() == expected.keys()
        assert whole.keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(whole[key], value, rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}")
    return results[0][3]


PLANS, GRIDS = ("none", "model", "batch"), ("2x1", "2x2", "1x4", "3x1")
#: Each model by each plan; each on three of the grids, and with both kinds of attention.
CASES = [
    (name, ("eager", "sdpa")[(number // 2 + turn) % 2], plan, GRIDS[(number + turn) % 4])
    for number, name in enumerate(MODELS)
    for turn, plan in enumerate(PLANS)
]


@pytest.mark.parametrize(("name", "attention", "plan", "grid"), CASES)
def test_trains_as_in_one_process(name: str, attention: str, plan: str, grid: str) -> None:
    compare(name, attention, plan, grid)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_caches_and_positions(name: str) -> None:
    """What is kept of the first words serves the next ones; positions have no samples."""
    model = made(name, "sdpa").eval()

    def call(model: nn.Module, first: int, last: int) -> tuple[Tensor, Tensor]:
        ids, place = words()[first:last], torch.arange(LENGTH)[None]
        if name == "t5":
            one = model(input_ids=ids, decoder_input_ids=ids[:, :3], use_cache=True)
            more = {"decoder_input_ids": ids[:, 3:], "encoder_outputs": (one.encoder_last_hidden_state,)}
            return one.logits, model(**more, past_key_values=one.past_key_values).logits
        one = model(ids[:, :4], position_ids=place[:, :4], use_cache=True)
        two = model(ids[:, 4:], position_ids=place[:, 4:], past_key_values=one.past_key_values)
        return one.logits, two.logits

    with torch.no_grad():
        expected = call(model, 0, BATCH)

    def run(fabric: Fabric) -> Any:
        parallel = parallelize(copy.deepcopy(model), "2x2", fabric=fabric)
        parallel.batch.size = BATCH
        start, stop = parallel.samples(BATCH)
        with torch.no_grad():
            return slice(start, stop), call(parallel, start, stop)

    for mine, found in run_ranks(4, run)[0]:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other[mine], rtol=1e-9, atol=1e-11)


def test_attention_and_mlp_cost_one_sum_each() -> None:
    """Nothing else is sent within a block."""
    for name, last in (("bert", "output.dense"), ("llama", "_proj"), ("t5", (".o", ".wo")), ("gpt2", ".c_proj")):
        model = made(name, "eager").eval()

        def run(fabric: ThreadFabric, name: str = name, model: nn.Module = model) -> Any:
            parallel = parallelize(copy.deepcopy(model), "2x1", fabric=fabric)
            parallel.batch.size = BATCH
            with torch.no_grad():
                parallel(**MODELS[name][1]())
            return dict(fabric.traffic.messages), dict(parallel.left_whole)

        sent, left_whole = run_ranks(2, run)[0][0]
        blocks = {
            label.layer: count
            for label, count in sent.items()
            if (".layer" in label.layer or ".h." in label.layer) and "bias" not in label.layer
        }
        assert len(blocks) == (10 if name == "t5" else 4), sent
        assert all(layer.endswith(last) and count == 1 for layer, count in blocks.items()), sent
        assert all("shares parameters" in why for why in left_whole.values()), left_whole
