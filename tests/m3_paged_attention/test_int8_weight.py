"""Weights of eight bits: within half a step of the exact ones, and a model of them in every place of a dense one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from m1_single_request import DEFAULT_MODEL, ConfigError, ModelLoadError
from m1_single_request.trace_event import size
from m3_paged_attention import LLMEngine, ModelConfig, SamplingParams, int8_weight, model_loader
from m3_paged_attention.attention import native_library
from m3_paged_attention.int8_weight import GROUP_SIZE, Int8Weight
from m3_paged_attention.linear import QuantizedLinear
from m3_paged_attention.model_loader import load_model
from tests.equivalence.models import save_random_model
from tests.support.memory import peak_bytes
from training.explain import questions

FP32, BF16 = torch.float32, torch.bfloat16
NATIVE = pytest.param("native", marks=pytest.mark.skipif(bool(native_library.obstacle()), reason="no C++"))
BACKENDS = ["torch", NATIVE]
TOLERANCE = {FP32: 2e-6, BF16: 4e-3}


def exact(weight: Int8Weight) -> Tensor:
    return weight.dequantized(slice(None))


@pytest.mark.parametrize("width", [1, 127, 128, 129, 300])
def test_every_weight_is_within_half_a_step_of_its_group(width: int) -> None:
    torch.manual_seed(1)
    weight = torch.randn(7, width) * torch.logspace(-6, 6, 7)[:, None]
    quantized = Int8Weight.of(weight)
    assert quantized.shape == weight.shape and quantized.scales.shape == (7, -(-width // GROUP_SIZE))
    steps = quantized.scales.repeat_interleave(GROUP_SIZE, 1)[:, :width]
    assert ((exact(quantized) - weight).abs() <= 0.501 * steps).all()
    assert (quantized.values.abs().amax(1) == 127).all(), "the whole range is used"
    assert quantized.nbytes == 7 * width + 4 * quantized.scales.numel()


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden() -> None:
    weight = torch.ones(4, 2 * GROUP_SIZE)
    weight[0] = 0.0
    weight[1, 3], weight[2, GROUP_SIZE] = torch.nan, torch.inf
    result = exact(Int8Weight.of(weight))
    assert torch.equal(result[0], weight[0]) and torch.equal(result[3], weight[3])
    assert result[1, :GROUP_SIZE].isnan().all() and torch.equal(result[1, GROUP_SIZE:], weight[1, GROUP_SIZE:])
    assert result[2, GROUP_SIZE:].isnan().all() and torch.equal(result[2, :GROUP_SIZE], weight[2, :GROUP_SIZE])


def test_parts_are_views_and_a_copy_needs_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    weight = torch.randn(600, 256)
    whole = Int8Weight.empty(600, 256, FP32, torch.device("cpu"))
    monkeypatch.setattr(int8_weight, "AT_ONCE", 2560)
    for part, rows in zip(whole.split_with_sizes([500, 100]), weight.split([500, 100]), strict=True):
        assert peak_bytes(lambda part=part, rows=rows: part.copy_(rows)) < 100_000
    assert torch.equal(whole.values, Int8Weight.of(weight).values)
    assert torch.equal(whole.scales, Int8Weight.of(weight).scales)


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_the_layer_of_torch_computes_what_float64_does(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(int8_weight, "AT_ONCE", 3000)
    weight, bias, hidden = Int8Weight.of(torch.randn(70, 300).to(dtype)), torch.randn(70).to(dtype), torch.randn(5, 300)
    result = QuantizedLinear(weight, bias)(hidden.to(dtype))
    expected = hidden.to(dtype).double() @ exact(weight).double().T + bias.double()
    assert result.dtype == dtype
    assert (result - expected).abs().max() / expected.abs().max() < TOLERANCE.get(dtype, 1e-3)


# --- models -----------------------------------------------------------------------------------------------------------


def load(model: Path, **settings: Any) -> Any:
    return load_model(ModelConfig(model=model, device="cpu", quantization="int8", **settings))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_bytes_are_counted_as_they_are(tied: bool, load_format: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The embedding keeps its precision; beside it, an output layer of its own is quantized in either case."""
    directory = save_random_model(tmp_path, "qwen3", tie_word_embeddings=tied)
    settings: Any = {"load_format": load_format, "dtype": "bfloat16", "attention_backend": "torch"}
    dense = load_model(ModelConfig(model=directory, device="cpu", **settings))
    model = load(directory, **settings)
    decoder, linears = model.model, [model.model.head]
    for layer in decoder.layers:
        linears += [layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]
    assert all(type(linear) is QuantizedLinear for linear in linears)
    in_linears = sum(linear.weight.nbytes for linear in linears)
    norms = dense.num_parameters - sum(w.shape[0] * w.shape[1] for w in (each.weight for each in linears))
    norms -= 0 if tied else decoder.embedding.numel()
    assert model.num_parameters == dense.num_parameters
    assert model.weight_bytes == in_linears + decoder.embedding.nbytes + 2 * norms
    monkeypatch.setattr(model_loader, "available_memory", lambda device: model.weight_bytes - 1)
    with pytest.raises(ModelLoadError, match=f"they need {size(model.weight_bytes)} as int8 and bfloat16, and"):
        load(directory, **settings)


def test_the_same_seed_gives_the_same_dummy_weights(tmp_path: Path) -> None:
    directory = save_random_model(tmp_path, "qwen3")
    settings: Any = {"load_format": "dummy", "attention_backend": "torch"}
    dense = load_model(ModelConfig(model=directory, device="cpu", **settings)).model
    linear = load(directory, **settings).model.layers[-1].mlp.down_proj
    weight = dense.layers[-1].mlp.down_proj
    expected = Int8Weight.of(weight.weight)
    assert torch.equal(linear.weight.values, expected.values) and torch.equal(linear.weight.scales, expected.scales)


def test_loading_never_holds_the_dense_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_weight, "AT_ONCE", 2**16)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    directory = save_random_model(tmp_path, "qwen3", **sizes)
    settings: Any = {"attention_backend": "torch", "load_format": "dummy"}  # the profiler counts a mapped file
    model = load(directory, **settings)
    peak = peak_bytes(lambda: load(directory, **settings))
    assert model.weight_bytes < 0.45 * 4 * model.num_parameters
    assert peak < model.weight_bytes + 1.5 * 4 * 2 * 1024 * 256, "a tensor, and a part of it that is converted"


@pytest.mark.skipif(bool(native_library.obstacle()), reason="no C++")
def test_a_precision_without_kernels_is_refused(tmp_path: Path) -> None:
    directory = save_random_model(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match="quantization='int8' has no kernels for float16 in the backend native"):
        load(directory, dtype="float16", attention_backend="native")
    load(directory, dtype="float16", attention_backend="torch")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization"):
        ModelConfig(quantization="int4")  # type: ignore[arg-type]


# --- quality ----------------------------------------------------------------------------------------------------------


def engine_of(backend: str, quantization: Any, dtype: str = "float32") -> LLMEngine:
    config: Any = {"attention_backend": backend, "quantization": quantization, "dtype": dtype, "device": "cpu"}
    return LLMEngine(model_config=ModelConfig(model=DEFAULT_MODEL, **config))


def answers(engine: LLMEngine, count: int) -> tuple[list[tuple[int, ...]], float]:
    """Greedy answers to questions in wordings of no training step, and the mean loss of the right answers' tokens."""
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    asked = questions()[:: len(questions()) // count][:count]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": each.held_out}], add_generation_prompt=True, return_dict=False
        )
        for each in asked
    ]
    outputs = engine.generate_batch(prompts, SamplingParams(max_tokens=24, temperature=0.0)).values()
    right = [tokenizer(each.answer, add_special_tokens=False).input_ids for each in asked]
    scored = engine.generate_batch(
        [prompt + answer for prompt, answer in zip(prompts, right, strict=True)],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
    ).values()
    losses = [
        -row[token].logprob
        for output, answer in zip(scored, right, strict=True)
        for row, token in zip(output.prompt_logprobs[-len(answer) :], answer, strict=True)
    ]
    return [output.token_ids for output in outputs], sum(losses) / len(losses)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_checkpoint_keeps_its_answers_and_its_perplexity(backend: str) -> None:
    found = {}
    for quantization in (None, "int8"):
        with engine_of(backend, quantization) as engine:
            found[quantization] = answers(engine, 12)
    (tokens, loss), (exact_tokens, exact_loss) = found["int8"], found[None]
    assert abs(loss - exact_loss) < 0.005
    assert sum(one == other for one, other in zip(tokens, exact_tokens, strict=True)) >= 11


@pytest.mark.skipif(bool(native_library.obstacle()), reason="no C++")
def test_both_backends_give_the_same_tokens() -> None:
    found = []
    for backend in ("torch", "native"):
        with engine_of(backend, "int8") as engine:
            found.append(answers(engine, 6)[0])
    assert found[0] == found[1]
