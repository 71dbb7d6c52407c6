"""Contract of a layer of m3's decoder: attention over blocks and an MLP, with one residual, against float64."""

from dataclasses import fields
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.kv_storage import KVLayer
from m3_paged_attention.models.architecture import DecoderConfig
from m3_paged_attention.models.rotary import RotaryTable, default_rope
from m3_paged_attention.models.weights import LayerWeights, allocate
from tests.contracts.part import Part, close

PART = Part(
    name="decoder_layer",
    target="m3_paged_attention.models.layers:DecoderLayer",
    lesson="docs/m3_model.md#decoder-our-own-model",
    starter="MyDecoderLayer",
    variant="m3_paged_attention-block-16",
)

BLOCK_SIZE, NUM_BLOCKS, HEAD_DIM = 4, 24, 4


class FreshBackend(TorchBackend):
    """A backend that changes none of its arguments: all results are new tensors."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return super().add_rms_norm(x, residual.clone(), weight, eps)


class InPlaceBackend(TorchBackend):
    """A backend that writes results over its arguments, where it may."""

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return heads.copy_(super().rotary(heads, cos, sin))


def model(
    heads: tuple[int, int] = (1, 1), *, layers: int = 1, bias: bool = False, qk_norm: bool = False, seed: int = 0
) -> tuple[DecoderConfig, list[LayerWeights]]:
    """A configuration and random weights. `heads`: of queries and of KV."""
    config = DecoderConfig(
        num_layers=layers,
        hidden_size=8,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=HEAD_DIM,
        intermediate_size=12,
        vocab_size=4,
        rms_norm_eps=0.05,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        qk_norm=qk_norm,
        tie_word_embeddings=True,
        rope=default_rope(100.0, HEAD_DIM),
    )
    weights = allocate(config, torch.float32, torch.device("cpu")).layers
    generator = torch.Generator().manual_seed(seed)
    for layer in weights:
        for each in fields(layer):
            if (tensor := getattr(layer, each.name)) is not None:
                tensor.normal_(0.0, 0.4, generator=generator).add_(tensor.dim() == 1)
    return config, weights


class Requests:
    """Requests of a few tokens that run through layers, and what comes out of the same layers without any KV memory."""

    def __init__(
        self, part: Any, config: DecoderConfig, weights: list[LayerWeights], backend: Any = None, text: str = ""
    ) -> None:
        backend = backend or TorchBackend()
        self.config, self.weights, self.text = config, weights, text
        self.layers = [part(config, layer, backend) for layer in weights]
        shape = NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim
        self.memory = [KVLayer(torch.zeros(shape), torch.zeros(shape)) for _ in weights]
        self.rotary = RotaryTable(config.rope, 64, torch.device("cpu"))
        self.generator = torch.Generator().manual_seed(1)
        self.tokens: list[Tensor] = []  # of each request, [tokens so far, hidden_size]
        self.tables = 1 + torch.randperm(NUM_BLOCKS - 1, generator=self.generator)[:20].view(-1, 5).numpy()

    def step(self, *new: tuple[int, int], hint: str = "") -> None:
        """Compare one step of rows (request, new tokens), those with several new tokens first."""
        contexts = []
        for request, count in new:
            while len(self.tokens) <= request:
                self.tokens.append(torch.zeros(0, self.config.hidden_size))
            contexts.append(len(self.tokens[request]))
            drawn = torch.randn(count, self.config.hidden_size, generator=self.generator)
            self.tokens[request] = torch.cat([self.tokens[request], drawn])
        hidden = torch.cat([self.tokens[request][-count:] for request, count in new])
        got = self.run(hidden, None, new, contexts)
        whole = [dense(self.config, self.weights, self.tokens[request], self.rotary) for request, _ in new]
        expected = [torch.cat([of[i][-count:] for of, (_, count) in zip(whole, new, strict=True)]) for i in (0, 1)]
        rows = [f"request {new[i][0]}: {before} tokens before, {new[i][1]} new" for i, before in enumerate(contexts)]
        self.check(got, expected, "; ".join([self.text, *rows] if self.text else rows), hint)

    def run(
        self, hidden: Tensor, residual: Tensor | None, new: Any = ((0, 1),), contexts: Any = (0,)
    ) -> tuple[Tensor, Tensor]:
        """Run the layers as the decoder does."""
        positions = np.concatenate([np.arange(n, n + count) for (_, count), n in zip(new, contexts, strict=True)])
        tables = np.stack([self.tables[request] for request, _ in new]).astype(np.int32)
        rows = np.repeat(np.arange(len(new)), [count for _, count in new])
        slots = tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        metadata = AttentionMetadata.build([count for _, count in new], contexts, tables, slots)
        cos, sin = self.rotary(torch.from_numpy(positions))
        hidden = hidden.clone()
        for layer, memory in zip(self.layers, self.memory, strict=True):
            hidden, residual = layer(hidden, residual, cos, sin, memory, metadata)
        assert residual is not None
        return hidden, residual

    def check(self, got: tuple[Tensor, Tensor], expected: Any, on: str, hint: str) -> None:
        """Compare the residual first: what the layer returns is computed from it."""
        for name, index in (("the residual", 1), ("the output of the MLP", 0)):
            close(got[index], expected[index], on=f"{on}; {name} that is returned", tolerance=2e-5, hint=hint)


# --- the same in float64, a whole text at once ------------------------------------------------------------------------


def dense(
    config: DecoderConfig, weights: list[LayerWeights], tokens: Tensor, rotary: RotaryTable
) -> tuple[Tensor, Tensor]:
    """The output of the last layer's MLP and the residual, of all tokens of one text."""
    output, residual = torch.zeros(tokens.shape, dtype=torch.float64), tokens.double()
    angles = torch.complex(*(table[: len(tokens)].double() for table in (rotary.cos, rotary.sin)))
    for each in weights:
        residual = residual + output
        normed = rms_norm(residual, each.input_norm, config.rms_norm_eps)
        residual = residual + attention(config, each, normed, angles)
        normed = rms_norm(residual, each.post_attention_norm, config.rms_norm_eps)
        gate, up = linear(normed, each.gate_up, each.gate_up_bias).chunk(2, -1)
        output = linear(gate / (1 + (-gate).exp()) * up, each.down, each.down_bias)
    return output, residual


def attention(config: DecoderConfig, weights: LayerWeights, hidden: Tensor, angles: Tensor) -> Tensor:
    query, key, value = keys_and_all(config, weights, hidden, angles)
    group = config.num_heads // config.num_kv_heads
    heads = []
    for head in range(config.num_heads):
        scores = query[:, head] @ key[:, head // group].T * config.head_dim**-0.5
        unseen = torch.ones(scores.shape, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(unseen, -torch.inf).softmax(-1) @ value[:, head // group])
    return linear(torch.cat(heads, -1), weights.o, weights.o_bias)


def keys_and_all(
    config: DecoderConfig, weights: LayerWeights, hidden: Tensor, angles: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each `[tokens, heads, head_dim]`, as attention uses them."""
    qkv = linear(hidden, weights.qkv, weights.qkv_bias).unflatten(-1, (-1, config.head_dim))
    query, key, value = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
    if weights.q_norm is not None and weights.k_norm is not None:
        query = rms_norm(query, weights.q_norm, config.rms_norm_eps)
        key = rms_norm(key, weights.k_norm, config.rms_norm_eps)
    return turned(query, angles), turned(key, angles), value


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Each pair (x[i], x[i + half]) as a complex number, times exp(i * angle)."""
    product = torch.complex(*x.chunk(2, -1)) * angles[:, None]
    return torch.cat([product.real, product.imag], -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    return x @ weight.double().T + (0.0 if bias is None else bias.double())


# --- the behaviours ---------------------------------------------------------------------------------------------------


def quiet(weights: list[LayerWeights], *names: str) -> list[LayerWeights]:
    """Weights with zeros in the last product of attention (`o`) or of the MLP (`down`): it adds nothing."""
    for layer in weights:
        for name in names:
            getattr(layer, name).zero_()
    return weights


def heads_of(heads: tuple[int, int]) -> str:
    return f"heads: {heads[0]} of Q, {heads[1]} of K and V"


def test_the_first_residual_is_the_embedding(part: Any) -> None:
    """The first layer has no residual: its residual is the embedding itself, not its norm."""
    config, weights = model()
    hint = "The norm is the input of attention. The residual is the sum before the norm."
    Requests(part, config, quiet(weights, "o", "down"), text="attention and MLP give zeros").step((0, 1), hint=hint)


def test_the_output_before_is_added(part: Any) -> None:
    """A later layer adds what the MLP before it returned to the residual."""
    config, weights = model()
    one = Requests(part, config, quiet(weights, "o", "down"))
    hidden, residual = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(2))
    expected = torch.zeros(1, 8), hidden + residual
    hint = "`hidden` is what the MLP of the layer before returned. Nobody has added it yet: `add_rms_norm` does."
    one.check(one.run(hidden, residual.clone()), expected, "a later layer; attention and MLP give zeros", hint)


def test_the_mlp_reads_the_second_norm(part: Any) -> None:
    """The MLP reads the residual after `post_attention_norm`; its output is returned, and not added to the residual."""
    config, weights = model()
    hint = "The next layer adds the output to the residual. Each of the two norms has its own weight."
    Requests(part, config, quiet(weights, "o"), text="attention gives zeros").step((0, 1), hint=hint)


def test_attention_reads_the_first_norm(part: Any) -> None:
    """Attention reads the residual after `input_norm`, and its output is added to the residual."""
    config, weights = model()
    hint = "One token attends to itself alone: attention is then `o_proj` of the value of the normed token."
    Requests(part, config, quiet(weights, "down"), text="the MLP gives zeros").step((0, 1), hint=hint)


def test_the_mlp_reads_what_attention_added(part: Any) -> None:
    """The MLP reads the sum of the residual and of attention's output."""
    hint = "The second norm is that of the sum with attention's output: `add_rms_norm` gives both."
    Requests(part, *model()).step((0, 1), hint=hint)


def test_one_product_has_queries_keys_and_values(part: Any) -> None:
    """The rows of `qkv_proj` are all query heads, then all key heads, then all value heads."""
    hint = "[tokens, (heads + 2 * kv_heads) * head_dim]: view it by heads, and split it into heads, kv_heads, kv_heads."
    for heads in ((2, 2), (4, 2), (3, 1)):
        Requests(part, *model(heads), text=heads_of(heads)).step((0, 1), hint=hint)


def test_tokens_attend_by_their_positions(part: Any) -> None:
    """Queries and keys are turned by the angle of their position, and scores multiplied by head_dim ** -0.5."""
    hint = "`rotary` turns queries and keys, not values, and returns the result. Then attention, with `self.scale`."
    for heads in ((1, 1), (4, 2)):
        Requests(part, *model(heads), text=heads_of(heads)).step((0, 5), hint=hint)


def test_keys_and_values_are_stored(part: Any) -> None:
    """The turned keys and the values are in the slots of their tokens, and nothing else is written."""
    config, weights = model((4, 2))
    one = Requests(part, config, weights)
    tokens = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
    one.run(tokens, None, [(2, 6)], [0])
    angles = torch.complex(*(table[:6].double() for table in (one.rotary.cos, one.rotary.sin)))
    normed = rms_norm(tokens.double(), weights[0].input_norm, config.rms_norm_eps)
    _, key, value = keys_and_all(config, weights[0], normed, angles)
    on = f"6 tokens of a request with the table {one.tables[2].tolist()}, blocks of {BLOCK_SIZE}"
    hint = "Keys are stored as attention reads them: after `rotary`. Values are stored as they are."
    for name, cache, new in (("value", one.memory[0].value_cache, value), ("key", one.memory[0].key_cache, key)):
        expected = torch.zeros(cache.shape, dtype=torch.float64)
        for position in range(6):
            expected[one.tables[2][position // BLOCK_SIZE], position % BLOCK_SIZE] = new[position]
        close(cache, expected, on=f"{on}; {name}_cache", tolerance=2e-5, hint=hint)


def test_earlier_tokens_are_read_from_memory(part: Any) -> None:
    """A new token attends to the earlier tokens of its request, which are in memory only."""
    one = Requests(part, *model((4, 2)))
    hint = "`store_kv` before `attention`: a token attends to itself, too, and reads its own key from memory."
    for count in (5, 1, 1, 3):
        one.step((0, count), hint=hint)


def test_heads_may_be_normed(part: Any) -> None:
    """In a model with norms of the heads, each head of Q and K is normed before it is turned."""
    hint = "First the norm of each head, with `q_norm` or `k_norm`, then `rotary`. A model without them has None there."
    for heads in ((1, 1), (4, 2)):
        text = f"norms of the heads; {heads_of(heads)}"
        Requests(part, *model(heads, qk_norm=True), text=text).step((0, 5), hint=hint)


def test_results_of_the_backend_are_used(part: Any) -> None:
    """A backend may write a result over its argument, or into new memory: both give the same."""
    hint = "Use what `add_rms_norm` and `rotary` return, and not what you gave to them: that may have changed, or not."
    for backend, text in ((FreshBackend, "changes no argument"), (InPlaceBackend, "writes over its arguments")):
        one = Requests(part, *model((4, 2), layers=2, qk_norm=True), backend(), f"two layers; the backend {text}")
        one.step((0, 4), hint=hint)
        one.step((0, 1), hint=hint)


def test_steps_of_several_requests(part: Any) -> None:
    """Layers of all kinds give what they give for each request alone, step after step."""
    rng = Random(11)
    for seed in range(6):
        heads, bias, qk_norm = rng.choice([(4, 2), (2, 2), (6, 1)]), rng.random() < 0.5, rng.random() < 0.5
        text = f"3 layers; {heads_of(heads)}; bias {bias}, norms of the heads {qk_norm}"
        one = Requests(part, *model(heads, layers=3, bias=bias, qk_norm=qk_norm, seed=seed), text=text)
        for _ in range(3):
            rows = [(request, rng.choice([1, 1, 2, 5])) for request in rng.sample(range(4), rng.randint(1, 4))]
            rows.sort(key=lambda row: row[1] == 1)
            ends = accumulate(count for _, count in rows)
            places = ", ".join(f"{end - count} to {end - 1}" for (_, count), end in zip(rows, ends, strict=True))
            hint = f"The first index is a token of the step; those of the requests, in this order, are {places}."
            one.step(*rows, hint=hint)
