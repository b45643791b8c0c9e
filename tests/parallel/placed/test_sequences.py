"""Recurrent layers and attention in all their ways, divided or whole: they compute what one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.parallel.shard import gather_state
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.testing.threads import run_ranks

BATCH, TIME, WIDTH = 5, 4, 8


class Of(nn.Module):
    """A layer, and how it is called with activations of (samples, time, features)."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor, Tensor], Any], **more: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(WIDTH, WIDTH), layer
        for name, module in more.items():
            self.add_module(name, module)
        self.call = call

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        found = self.call(self, self.before(x), words)
        parts = [found] if isinstance(found, Tensor) else [each for each in found if each is not None]
        return torch.stack([each.flatten(1).sin().sum(1) for each in parts], 1)


def recurrent(layer: nn.RNNBase, *, states: bool = False) -> Of:
    """Its output and last states; ``states``: which it is given at first."""

    def call(model: Any, x: Tensor, words: Tensor) -> list[Tensor]:
        own: nn.RNNBase = model.layer
        x = x if own.batch_first else x.transpose(0, 1)
        first = None
        if states:
            count = own.num_layers * (2 if own.bidirectional else 1)
            given = [x.mean(0 if not own.batch_first else 1)[None, :, : own.proj_size or own.hidden_size].repeat(count, 1, 1)]
            given.append(x.sum(0 if not own.batch_first else 1)[None, :, : own.hidden_size].repeat(count, 1, 1))
            first = tuple(given) if isinstance(own, nn.LSTM) else given[0]
        out, last = own(x, first)
        lasts = last if isinstance(last, tuple) else (last,)
        return [out if own.batch_first else out.transpose(0, 1), *(each.transpose(0, 1) for each in lasts)]

    return Of(layer, call)


def packed(layer: nn.RNNBase, *, sort: bool = False) -> Of:
    lengths = torch.tensor([4, 3, 3, 2, 1]) if sort else torch.tensor([2, 4, 1, 3, 2])

    def call(model: Any, x: Tensor, words: Tensor) -> list[Tensor]:
        sequence = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=sort)
        out, last = model.layer(sequence)
        found, _ = rnn.pad_packed_sequence(out, batch_first=True)
        return [found, (last[0] if isinstance(last, tuple) else last).transpose(0, 1)]

    return Of(layer, call)


def cell(layer: nn.RNNCellBase) -> Of:
    def call(model: Any, x: Tensor, words: Tensor) -> Tensor:
        state: Any = None
        for step in range(TIME):
            state = model.layer(x[:, step], state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state

    return Of(layer, call)


def attention(**settings: Any) -> Of:
    """``masks``: 2 or 3 dimensions, ``padding``, ``learned`` mask, ``cross``; the rest is the layer's."""
    mask, padding = settings.pop("mask", 0), settings.pop("padding", False)
    cross, need = settings.pop("cross", False), settings.pop("need", "average")
    first = settings.get("batch_first", True)
    layer = nn.MultiheadAttention(WIDTH, 4, **{"batch_first": True, **settings})
    other = nn.Linear(WIDTH, settings.get("kdim") or WIDTH)
    last = nn.Linear(WIDTH, settings.get("vdim") or WIDTH)

    def call(model: Any, x: Tensor, words: Tensor) -> list[Tensor | None]:
        keys = model.other(x.flip(1)[:, :3]) if cross else x
        values = model.last(x.flip(1)[:, :3]) if cross else x
        given = [x, keys, values] if first else [each.transpose(0, 1) for each in (x, keys, values)]
        if not cross and not first:
            given = [given[0]] * 3
        times = keys.shape[1]
        masks: Tensor | None = torch.ones(TIME, times, dtype=torch.bool).triu(1) if mask else None
        if mask == 3:
            assert masks is not None
            few = (words[:, :1, None] % 2 == 0) & masks  # others for each sample
            masks = few[:, None].expand(BATCH, 4, TIME, times).reshape(-1, TIME, times)
        ignored = words[:, :times] == 3 if padding else None
        out, weights = model.layer(
            *given, key_padding_mask=ignored, attn_mask=masks, need_weights=bool(need), average_attn_weights=need != "each"
        )
        return [out if first else out.transpose(0, 1), weights]

    return Of(layer, call, other=other, last=last)


def decoder(norm_first: bool, batch_first: bool) -> Of:
    layer = nn.TransformerDecoderLayer(WIDTH, 4, 12, 0.0, batch_first=batch_first, norm_first=norm_first)

    def call(model: Any, x: Tensor, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(TIME, dtype=x.dtype)
        memory = x.sin()[:, :3]
        given = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
        found: Tensor = model.layer(*given, tgt_mask=mask, tgt_is_causal=True)
        return found if batch_first else found.transpose(0, 1)

    return Of(layer, call)


def bag(mode: str, form: str) -> Of:
    def call(model: Any, x: Tensor, words: Tensor) -> Tensor:
        if form == "matrix":
            return model.layer(words) + x.mean(1)  # type: ignore[no-any-return]
        if form == "weights":
            return model.layer(words, per_sample_weights=x.sum(2)) + x.mean(1)  # type: ignore[no-any-return]
        found: Tensor = model.layer(words.flatten(), torch.arange(0, BATCH * TIME, TIME)) + x.mean(1)
        return found

    return Of(nn.EmbeddingBag(7, WIDTH, mode=mode), call)


def plain(layer: nn.Module) -> Of:
    return Of(layer, lambda model, x, words: model.layer(x))


#: What takes no divisor of its width is divided unevenly.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: recurrent(nn.LSTM(WIDTH, 6, 2, batch_first=True)),
    "lstm time first": lambda: recurrent(nn.LSTM(WIDTH, 6, bias=False)),
    "lstm both ways": lambda: recurrent(nn.LSTM(WIDTH, 6, 2, batch_first=True, bidirectional=True), states=True),
    "lstm with states": lambda: recurrent(nn.LSTM(WIDTH, 6, 2, batch_first=True), states=True),
    "lstm projected": lambda: recurrent(nn.LSTM(WIDTH, 6, 2, batch_first=True, proj_size=3)),
    "lstm projected with states": lambda: recurrent(nn.LSTM(WIDTH, 6, batch_first=True, proj_size=3), states=True),
    "lstm packed": lambda: packed(nn.LSTM(WIDTH, 6, 2, batch_first=True)),
    "lstm packed sorted": lambda: packed(nn.LSTM(WIDTH, 6, batch_first=True, bidirectional=True), sort=True),
    "gru": lambda: recurrent(nn.GRU(WIDTH, 6, 2, batch_first=True)),
    "gru with states": lambda: recurrent(nn.GRU(WIDTH, 6, 1, bidirectional=True), states=True),
    "gru packed": lambda: packed(nn.GRU(WIDTH, 6, batch_first=True)),
    "rnn": lambda: recurrent(nn.RNN(WIDTH, 6, 2, batch_first=True)),
    "rnn relu with states": lambda: recurrent(nn.RNN(WIDTH, 6, nonlinearity="relu"), states=True),
    "rnn packed": lambda: packed(nn.RNN(WIDTH, 6, batch_first=True)),
    "lstm cell": lambda: cell(nn.LSTMCell(WIDTH, 6)),
    "gru cell": lambda: cell(nn.GRUCell(WIDTH, 6)),
    "rnn cell": lambda: cell(nn.RNNCell(WIDTH, 6, nonlinearity="relu")),
    "attention": lambda: attention(),
    "attention time first": lambda: attention(batch_first=False, need=""),
    "attention without bias": lambda: attention(bias=False, need="each"),
    "attention masked": lambda: attention(mask=2, need=""),
    "attention masked with weights": lambda: attention(mask=2, padding=True, need="each"),
    "attention masked by sample": lambda: attention(mask=3),
    "attention masked by sample time first": lambda: attention(mask=3, batch_first=False, need=""),
    "attention padded": lambda: attention(padding=True),
    "attention across": lambda: attention(cross=True, padding=True),
    "attention across time first": lambda: attention(cross=True, batch_first=False, need=""),
    "attention of other widths": lambda: attention(cross=True, kdim=6, vdim=5),
    "attention of other widths masked": lambda: attention(cross=True, kdim=6, vdim=5, mask=2, batch_first=False, need="each"),
    "attention with more keys": lambda: attention(add_bias_kv=True),
    "attention with more keys and zeros": lambda: attention(add_bias_kv=True, add_zero_attn=True, mask=2, padding=True),
    "attention with zeros": lambda: attention(add_zero_attn=True, need=""),
    "decoder": lambda: decoder(False, True),
    "decoder norm first": lambda: decoder(True, False),
    "bag": lambda: bag("mean", "matrix"),
    "bag summed": lambda: bag("sum", "weights"),
    "bag of offsets": lambda: bag("sum", "offsets"),
    "bag of maxima": lambda: bag("max", "matrix"),
    "bilinear": lambda: Of(nn.Bilinear(WIDTH, WIDTH, 6), lambda model, x, words: model.layer(x, x.sin())),
    "prelu": lambda: Of(nn.PReLU(TIME), lambda model, x, words: model.layer(x)),
    "prelu of one": lambda: plain(nn.PReLU()),
    "rms norm": lambda: plain(nn.RMSNorm(WIDTH, eps=0.3)),
    "layer norm": lambda: plain(nn.LayerNorm([TIME, WIDTH])),
    "cosine": lambda: Of(nn.Linear(WIDTH, 6), lambda model, x, words: functional.cosine_similarity(model.layer(x), x[..., :6], 2)),
}


def _data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(BATCH, TIME, WIDTH, generator=generator, dtype=torch.float64),
        "words": torch.cat([torch.zeros(BATCH, 1, dtype=torch.int64), torch.randint(7, (BATCH, TIME - 1), generator=generator)], 1),
    }


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def plan_of(model: nn.Module, choice: str, grid: Grid) -> Plan | None:
    if choice == "none":
        return None
    return Plan(tuple(LayerPlan(name, choice, grid) for name, _ in model.named_children()))  # type: ignore[arg-type]


def train(model: nn.Module, inputs: dict[str, Tensor], target: Tensor, summed: Callable[[], None], out: Callable[[], slice]) -> Any:
    found: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        output = model(**inputs)
        found[f"output {step}"] = output.detach()
        ((output * target[out()][:, : output.shape[1]]).sum() / BATCH).backward()
        summed()
        if not step:
            found |= {f"gradient {name}": each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        optimizer.step()
    return found


def compare(name: str, choice: str, grid: str) -> dict[str, str]:
    target = torch.arange(BATCH * 3, dtype=torch.float64).cos().view(BATCH, 3)
    model, wanted = made(name), Grid.parse(grid)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = train(model, _data(), target, lambda: None, lambda: slice(None))

    def run(fabric: Fabric) -> Any:
        own = made(name)
        own.load_state_dict(state)
        parallel = parallelize(own, wanted, plan_of(own, choice, wanted), fabric=fabric)
        parallel.batch.size = BATCH
        start, stop = parallel.samples(BATCH)
        shards = parallel.shards_by_name()

        def mine() -> slice:
            there = parallel.output_range()
            return slice(start + there.start, start + there.stop)

        inputs = {key: value[start:stop] for key, value in _data().items()}
        found = train(parallel, inputs, target, lambda: sum_gradients(parallel, fabric, shards), mine)
        gradients = {key.removeprefix("gradient "): each for key, each in found.items() if key.startswith("gradient")}
        found |= {f"gradient {key}": each for key, each in gather_state(gradients, shards, fabric).items()}
        return found, parallel.whole_state(), mine(), dict(parallel.left_whole)

    results, _ = run_ranks(wanted.size, run)
    close = {"rtol": 1e-9, "atol": 1e-11}
    for found, whole, mine, _ in results:
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            there = value[mine] if key.startswith("output") else value
            torch.testing.assert_close(found[key], there, **close, msg=lambda text, key=key: f"{key}: {text}")
        for key, value in model.state_dict().items():
            torch.testing.assert_close(whole[key], value, **close, msg=lambda text, key=key: f"{key}: {text}")
    return results[0][3]  # type: ignore[no-any-return]


CHOICES, GRIDS = ["none", "model", "batch", "whole"], ["2x1", "2x2", "1x4", "3x1"]


#: Each model divided, and by turns by its batch alone and not at all.
CASES = [(name, choice) for number, name in enumerate(MODELS) for choice in ("model", ("batch", "whole")[number % 2])]


@pytest.mark.parametrize(("name", "choice"), CASES)
def test_trains_as_in_one_process(name: str, choice: str) -> None:
    number = list(MODELS).index(name) + CHOICES.index(choice)
    compare(name, choice, GRIDS[number % 4] if choice != "model" else GRIDS[number % 4].replace("1x4", "2x2"))
