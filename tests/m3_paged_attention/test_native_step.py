"""All layers in one call: bitwise the numbers of the layers one by one, and which steps and models run so."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from m1_single_request import DEFAULT_MODEL, ForwardError
from m1_single_request.model_loader import LoadedModel
from m1_single_request.output_events import Sampled
from m1_single_request.trace_readers import Records
from m3_paged_attention import LLMEngine, ModelConfig, SamplingParams, TraceConfig
from m3_paged_attention.attention import native_library, native_step
from m3_paged_attention.events import EagerSteps
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.linear import PlainLinear
from m3_paged_attention.models.layers import MLP, DecoderLayer
from m3_paged_attention.wiring import PARTS
from tests.equivalence.models import save_random_model
from tests.m3_paged_attention.test_decoder import Paged, load, tokens_of
from tests.support.amounts import examples

if OBSTACLE := native_library.obstacle():
    pytest.skip(OBSTACLE, allow_module_level=True)

WIDE = {"head_dim": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "norms of heads": ("qwen3", WIDE),
    "no norms of heads, biases of Q, K and V": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "all biases": ("llama", WIDE | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}),
    "one layer": ("qwen3", WIDE | {"num_hidden_layers": 1}),
    "experts": ("qwen3_moe", {}),
    "experts in the first and the last layer": ("qwen3_moe", {"num_experts_per_tok": 1}),
}


def at_once_and_one_by_one(loaded: LoadedModel) -> tuple[Paged, Paged]:
    """One model over two KV memories: the first is prepared, so steps over the second run layer by layer."""
    at_once, one_by_one = Paged(loaded), Paged(loaded)
    for paged in (at_once, one_by_one):
        paged.kv.blocks.zero_()  # so that all of it can be compared
    loaded.model.use_kv(at_once.kv)
    assert loaded.model.eager_reason is None and at_once.kv.step is not None
    return at_once, one_by_one


def check(pair: tuple[Paged, Paged], new: dict[str, int]) -> None:
    """Run so many new tokens of each request; logits and KV are the same bits."""
    batch = {rid: tokens_of(count, count) for rid, count in new.items()}
    logits, expected = (paged.step(batch) for paged in pair)
    assert all(torch.equal(logits[rid], expected[rid]) for rid in batch)
    assert torch.equal(pair[0].kv.blocks, pair[1].kv.blocks)


def counted(pair: tuple[Paged, Paged], monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that returns the number of calls of all layers at once."""
    calls: list[object] = []
    step: Any = pair[0].kv.step
    run = step.run_layers
    monkeypatch.setattr(step, "run_layers", lambda table: (calls.append(table), run(table)))
    return lambda: len(calls)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_are_bitwise_those_of_the_layers_one_by_one(name: str, dtype: str, tmp_path: Path) -> None:
    architecture, overrides = MODELS[name]
    directory = save_random_model(tmp_path, architecture, **overrides)
    pair = at_once_and_one_by_one(load(directory, attention_backend="native", dtype=dtype))
    for new in ({"a": 17, "b": 6}, {"c": 4, "a": 1, "b": 1}, {"b": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 3, "c": 2}):
        check(pair, new)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_layers_are_bitwise_those_one_by_one(dtype: str, tmp_path: Path) -> None:
    directory = save_random_model(tmp_path, "llama", **MODELS["all biases"][1])
    pair = at_once_and_one_by_one(load(directory, attention_backend="native", dtype=dtype, quantization="int8"))
    for new in ({"a": 17, "b": 6}, {"c": 4, "a": 1, "b": 1}, {"b": 1}):
        check(pair, new)


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load(Path(DEFAULT_MODEL), attention_backend="native")


@settings(max_examples=examples(50))
@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1), min_size=1, max_size=6))
def test_any_mixture_of_prompts_and_decodes_gives_the_same_numbers(
    embedded: LoadedModel, steps: list[dict[str, int]]
) -> None:
    pair = at_once_and_one_by_one(embedded)
    for new in steps:
        check(pair, new)


def beside_each_other_and_alone(pair: tuple[Paged, Paged]) -> tuple[Tensor, Tensor]:
    """Return the logits of ten requests after a shared prefix, in a step of all and each alone: `[10, vocab]`.

    The first memory finds the prefix once in a call of all layers, the second one in each layer: the same bits."""
    batch = {name: tokens_of(number, 1) for number, name in enumerate("abcdefghij")}
    for paged in pair:
        paged.step({"prefix": tokens_of(0, 160)})
        for name in batch:
            paged.blocks[name], paged.lengths[name] = paged.blocks["prefix"].copy(), 160
    together, one_by_one = (paged.step(batch | {"prompt": tokens_of(0, 7)}) for paged in pair)
    assert all(torch.equal(together[name], one_by_one[name]) for name in together)
    pair[0].lengths |= dict.fromkeys(batch, 160)
    alone = [pair[0].step({name: token})[name] for name, token in batch.items()]
    return torch.cat([together[name] for name in batch]).float(), torch.cat(alone).float()


def test_a_shared_prefix_changes_logits_by_no_more_than_rounding_does() -> None:
    """Logits go up to 20, where bfloat16 has steps of 0.125. In bfloat16 they are as far from float32 with others as
    alone, and most tokens are the same."""
    (exact_together, exact), (together, alone) = (
        beside_each_other_and_alone(
            at_once_and_one_by_one(load(Path(DEFAULT_MODEL), attention_backend="native", dtype=dtype))
        )
        for dtype in ("float32", "bfloat16")
    )
    for one, other, tolerance in ((exact_together, exact, 4e-5), (together, alone, 0.3)):
        differences = (one - other).abs().amax(-1)
        assert (differences > 0).all() and differences.max() < tolerance
        assert (one.argmax(-1) == other.argmax(-1)).sum() >= 8
    assert (together - exact).norm() <= 1.25 * (alone - exact).norm()


def test_a_decode_step_of_the_embedded_checkpoint_is_2_calls_and_layer_by_layer_46(
    embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    kernels = embedded.model.backend._kernels[torch.float32]
    for name, call in list(vars(kernels).items()):
        monkeypatch.setattr(kernels, name, lambda *arguments, call=call: (calls.append(call), call(*arguments)))
    for paged, number in zip(at_once_and_one_by_one(embedded), (2, 46), strict=True):
        paged.step({"a": tokens_of(5, 5)})
        calls.clear()
        paged.step({"a": tokens_of(1, 1)})
        assert len(calls) == number


# --- which steps, and which models ------------------------------------------------------------------------------------


def test_a_step_with_too_many_tokens_runs_layer_by_layer(
    embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = at_once_and_one_by_one(embedded)
    num_calls = counted(pair, monkeypatch)
    monkeypatch.setattr(native_step, "MOST_TOKENS", 20)
    for new, expected in (({"a": 21}, 0), ({"a": 1, "b": 19}, 1), ({"b": 1, "a": 20}, 1), ({"a": 1}, 2)):
        check(pair, new)
        assert num_calls() == expected


def test_a_layer_that_is_replaced_is_called(embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook, for example; where it is removed, the layers run at once again."""
    pair = at_once_and_one_by_one(embedded)
    num_calls, layers, seen = counted(pair, monkeypatch), embedded.model.layers, []
    original = layers[1]

    def hook(*inputs: Any) -> Any:
        seen.append(inputs)
        return original(*inputs)

    layers[1] = hook
    try:
        check(pair, {"a": 3})
    finally:
        layers[1] = original
    assert (num_calls(), len(seen)) == (0, 2)
    check(pair, {"a": 1})
    assert (num_calls(), len(seen)) == (1, 2)


class OtherStorage(KVStorage):
    pass


class OtherLayer(DecoderLayer):
    pass


class OtherMLP(MLP):
    pass


def with_other_layer(model: Any) -> None:
    model.layers[0].__class__ = OtherLayer


def with_other_mlp(model: Any) -> None:
    model.layers[1].mlp.__class__ = OtherMLP


def with_plain_linear(model: Any) -> None:
    config = model.config
    model.layers[1].mlp.down_proj = PlainLinear(torch.zeros(config.hidden_size, config.intermediate_size))


@pytest.mark.parametrize(
    ("overrides", "dtype", "change", "reason"),
    [
        ({"head_dim": 24}, "float32", None, "head_dim=24 is no multiple of 32"),
        (WIDE | {"hidden_size": 72}, "float32", None, "hidden_size=72 is no multiple of 16"),
        (WIDE | {"intermediate_size": 100}, "bfloat16", None, "intermediate_size=100 is no multiple of 16"),
        (WIDE, "float16", None, "there are kernels for float32 and bfloat16, not for float16"),
        (WIDE, "float32", with_other_layer, "the class OtherLayer is not supported"),
        (WIDE, "float32", with_other_mlp, "the class OtherMLP is not supported"),
        (WIDE, "float32", with_plain_linear, "a linear layer is of the class PlainLinear"),
    ],
)
def test_a_model_that_the_call_does_not_know_runs_layer_by_layer_and_the_trace_says_why(
    overrides: dict[str, Any], dtype: str, change: Callable[[Any], None] | None, reason: str, tmp_path: Path
) -> None:
    directory, records = save_random_model(tmp_path, "qwen3", **overrides), Records()

    def load_changed(config: ModelConfig, kv_cache_dtype: str) -> LoadedModel:
        loaded = PARTS["model_loader"](config, kv_cache_dtype)
        if change is not None:
            change(loaded.model)
        return loaded

    with LLMEngine(
        model_config=ModelConfig(model=directory, dtype=dtype, attention_backend="native"),
        trace_config=TraceConfig(readers=(records,)),
        parts={"model_loader": load_changed},
    ) as engine:
        output = engine.generate("go on", SamplingParams(max_tokens=3))
        assert len(output.outputs[0].token_ids) > 0
    ((step, event),) = records.of(EagerSteps)
    assert step == 0 and event.reason.startswith(reason) and event.reason in event.explain()


def test_another_class_of_kv_memory_runs_layer_by_layer(embedded: LoadedModel) -> None:
    """Its layers may have another layout."""
    kv = Paged(embedded).kv
    kv.__class__ = OtherStorage
    embedded.model.use_kv(kv)
    assert kv.step is None
    assert embedded.model.eager_reason == "the class OtherStorage is not supported"


# --- the most likely token, without logits ----------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["m3_paged_attention", "m4_radix_cache", "m5_chunked_prefill_spec"])
def test_rows_without_options_get_the_same_tokens_with_and_without_logits(package: str) -> None:
    """A reader of the trace is told probabilities, and a row with an option needs logits."""
    face = importlib.import_module(package)
    plain = face.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    asking = dataclasses.replace(plain, logprobs=1)
    tokens = []
    with face.LLMEngine(model_config=face.ModelConfig(device="cpu", attention_backend="native")) as engine:
        for params, reader in ((plain, None), (plain, Records()), ([plain, plain, asking], None)):
            if reader is not None:
                engine.tracer.attach(reader)
            outputs = engine.generate_batch(["What is a KV cache?", "Why?", "Hello"], params, progress=False)
            tokens.append([output.outputs[0].token_ids for output in outputs.values()])
            if reader is not None:
                engine.tracer.detach(reader)
                assert len(reader.of(Sampled)) == 24
    assert tokens[0] == tokens[1] == tokens[2]


def test_logits_that_are_not_finite_end_their_own_request_alone() -> None:
    with LLMEngine(model_config=ModelConfig(device="cpu", attention_backend="native")) as engine:
        model: Any = engine.engine_core.executor.worker.model_runner.model
        model.embedding[300] = torch.nan
        good, bad = engine.generate_batch([[5, 6], [7, 300]], SamplingParams(temperature=0), progress=False).values()
        assert good.error is None and isinstance(bad.error, ForwardError)
