"""Experts: their logits are transformers' in every shape, their weights are read from every layout, and nothing of one
token depends on another."""

import random
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from m1_single_request.trace_event import Event
from m1_single_request.tracer import TraceReader, TraceRecord
from m3_paged_attention import ConfigError, LLMEngine, ModelConfig, ModelLoadError, SamplingParams, TraceConfig, demo
from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.native_backend import NativeBackend
from m3_paged_attention.attention.native_experts import NativeExperts
from m3_paged_attention.attention.registry import resolve
from m3_paged_attention.expert_events import ExpertsLoaded, ExpertsUsed
from m3_paged_attention.int8_weight import Int8Weight, Weight
from m3_paged_attention.model_loader import load_model
from m3_paged_attention.models.experts_config import ExpertsConfig, count_weights
from m3_paged_attention.models.qwen3_moe import SparseMLP
from m3_paged_attention.models.weights import dummy_weights, places
from m3_paged_attention.views.expert_map import KEY, ExpertMap, draw
from m3_paged_attention.worker import GPUWorker
from tests.equivalence.models import save_random_model
from tests.m3_paged_attention.checkpoints import edit_config, edit_weights
from tests.m3_paged_attention.test_decoder import BACKENDS, check_against_transformers
from tests.m3_paged_attention.test_weights import load, refusal, same, shape_of, split_up
from tests.support.demos import words

CPU = torch.device("cpu")
SHAPES: dict[str, dict[str, Any]] = {
    "two of five": {},
    "all layers": {"mlp_only_layers": []},
    "every second layer": {"mlp_only_layers": [], "decoder_sparse_step": 2},
    "one expert": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 5},
    "not normalized": {"norm_topk_prob": False},
    "as wide as the model": {"moe_intermediate_size": 64},
    "half as wide": {"moe_intermediate_size": 32},
    "a width that fills no vector": {"moe_intermediate_size": 36},
    "biases": {"attention_bias": True, "tie_word_embeddings": True},
    "no experts": {"num_experts": 0},
}
HIDDEN, WIDTH, NUM_EXPERTS = 64, 48, 5


class Kept(TraceReader):
    """Keeps the events of an engine, also those of its start."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def read(self, record: TraceRecord) -> None:
        self.events.append(record.event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(shape: str, backend: str, tmp_path: Path) -> None:
    check_against_transformers(save_random_model(tmp_path, "qwen3_moe", **SHAPES[shape]), backend)


def change_routers(directory: Path, change: Callable[[Tensor], Tensor]) -> Path:
    """Replace the routers of a checkpoint."""
    edit_weights(
        directory,
        lambda tensors: tensors.update({n: change(t) for n, t in tensors.items() if n.endswith("mlp.gate.weight")}),
    )
    return directory


def all_alike(router: Tensor) -> Tensor:
    return router[:1].expand_as(router).contiguous()


def alike_in_pairs(router: Tensor) -> Tensor:
    return torch.cat([router[:2], router[:2], router[4:]])


def none_to_the_last(router: Tensor) -> Tensor:
    """A row of zeros is never among the best two where others are of both signs."""
    return torch.cat([router[:1], -router[:1], router[1:2], -router[1:2], 0 * router[4:]])


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", [all_alike, alike_in_pairs, none_to_the_last])
def test_logits_are_those_of_transformers_where_the_router_is_undecided(
    change: Callable[[Tensor], Tensor], backend: str, tmp_path: Path
) -> None:
    """Ties, an expert that all tokens use, one that none uses."""
    check_against_transformers(change_routers(save_random_model(tmp_path, "qwen3_moe"), change), backend)


# --- the native operation ---------------------------------------------------------------------------------------------


def drawn(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Hidden states, two experts of each token, weights of these, and the weights of all experts."""
    rng = random.Random(0)
    torch.manual_seed(0)
    experts = torch.tensor([rng.sample(range(NUM_EXPERTS), 2) for _ in range(num_tokens)])
    gate_up, down = torch.randn(NUM_EXPERTS * 2 * WIDTH, HIDDEN) / 8, torch.randn(NUM_EXPERTS * HIDDEN, WIDTH) / 8
    hidden, weights = torch.randn(num_tokens, HIDDEN), torch.rand(num_tokens, 2)
    return hidden.to(dtype), experts, weights.to(dtype), gate_up.to(dtype), down.to(dtype)


needs_native = pytest.mark.skipif(bool(native_library.obstacle()), reason="no C++ compiler")


@needs_native
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_experts_give_a_token_the_same_bits_in_any_company(dtype: torch.dtype, quantized: bool) -> None:
    hidden, experts, weights, gate_up, down = drawn(5000, dtype)
    of_experts: list[Weight] = [Int8Weight.of(each) if quantized else each for each in (gate_up, down)]
    layer = NativeBackend().experts(*of_experts, NUM_EXPERTS)
    assert isinstance(layer, NativeExperts)
    alone = torch.cat([layer(hidden[i : i + 1], experts[i : i + 1], weights[i : i + 1]) for i in range(60)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for count in (2, 7, 33, 60, 500, 5000):
                found = layer(hidden[:count], experts[:count], weights[:count])
                assert torch.equal(found[:60], alone[:count])
    finally:
        torch.set_num_threads(before)


@needs_native
def test_native_experts_without_a_token_are_not_read() -> None:
    hidden, experts, weights, gate_up, down = drawn(6, torch.float32)
    experts = experts.clamp(max=3)
    experts[:, 1] = (experts[:, 0] + 1) % 4
    layer = NativeBackend().experts(gate_up, down, NUM_EXPERTS)
    wanted = layer(hidden, experts, weights)
    gate_up[4 * 2 * WIDTH :] = torch.nan
    down[4 * HIDDEN :] = torch.nan
    poisoned = NativeBackend().experts(gate_up, down, NUM_EXPERTS)
    assert torch.equal(poisoned(hidden, experts, weights), wanted)


@pytest.mark.parametrize("name", BACKENDS)
def test_quantized_experts_are_those_of_their_weights(name: str) -> None:
    hidden, experts, weights, gate_up, down = drawn(9, torch.float32)
    quantized = [Int8Weight.of(each) for each in (gate_up, down)]
    rounded = [each.dequantized(slice(None)) for each in quantized]
    backend = resolve(name, CPU)
    found, wanted = (backend.experts(*of, NUM_EXPERTS)(hidden, experts, weights) for of in (quantized, rounded))
    torch.testing.assert_close(found, wanted, atol=1e-3 * float(wanted.abs().max()), rtol=0)


# --- the router -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalizes", [False, True])
def test_the_router_is_float32_until_its_weights_are_cast(normalizes: bool) -> None:
    torch.manual_seed(0)
    config = ExpertsConfig(num_experts=8, top_k=3, intermediate_size=16, normalizes=normalizes, layers=frozenset([0]))
    router, hidden = torch.randn(8, 32).bfloat16(), torch.randn(40, 32).bfloat16()
    zeros = torch.zeros(8 * 32, 32).bfloat16(), torch.zeros(8 * 32, 16).bfloat16()
    logits = torch.nn.functional.linear(hidden, router)
    experts, weights = SparseMLP(config, router, *zeros, resolve("torch", CPU)).choose(logits)
    wanted, chosen = logits.float().softmax(-1).topk(3)
    if normalizes:
        wanted = wanted / wanted.sum(-1, keepdim=True)
    assert torch.equal(experts, chosen)
    assert torch.equal(weights, wanted.bfloat16())


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "moe", "qwen3_moe")


MLP = "model.layers.0.mlp"


def stack(directory: Path, *, transposed: bool) -> Path:
    """Store the experts of each layer in one tensor, as Qwen3-VL-MoE does."""
    shape = shape_of(directory)
    assert shape.experts is not None

    def change(tensors: dict[str, Tensor]) -> None:
        for layer in shape.experts.layers:
            mlp = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                [tensors.pop(f"{mlp}.{number}.{module}.weight") for number in range(shape.experts.num_experts)]
                for module in ("gate_proj", "up_proj", "down_proj")
            )
            both = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
            stacked = {"gate_up_proj": both, "down_proj": torch.stack(down)}
            for name, tensor in stacked.items():
                tensors[f"{mlp}.{name}"] = (tensor.transpose(1, 2) if transposed else tensor).contiguous()

    edit_weights(directory, change)
    return directory


@pytest.mark.parametrize("width", [48, 32, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_layout_holds_the_same_experts(tmp_path: Path, width: int, transposed: bool) -> None:
    """Also where a tensor has the same shape transposed: gate and up with a width of 32, down with 64."""
    directory = save_random_model(tmp_path, "qwen3_moe", moe_intermediate_size=width)
    whole = load(directory)
    assert same(load(stack(directory, transposed=transposed)), whole)
    split_up(directory)
    assert same(load(directory), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_expert_is_in_its_place(directory: Path, dtype: torch.dtype) -> None:
    found = places(shape_of(directory), load(directory, dtype))
    tensors = load_file(directory / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        place = found[name]
        assert isinstance(place, Tensor) and torch.equal(place, tensor.to(dtype)), name


EXPERT = f"{MLP}.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(EXPERT), f"the weights lack {EXPERT};"),
        (lambda tensors: tensors.pop(f"{MLP}.gate.weight"), f"the weights lack {MLP}.gate.weight;"),
        (
            lambda tensors: tensors.update({EXPERT: torch.zeros(64, 48)}),
            f"other shapes for {EXPERT} [64, 48] instead of [48, 64] in model.safetensors;",
        ),
        (
            lambda tensors: tensors.update({EXPERT.replace(".2.", ".5."): torch.zeros(48, 64)}),
            f"have unexpected {MLP}.experts.5.up_proj.weight;",
        ),
        (
            lambda tensors: tensors.update({f"{MLP}.experts.gate_up_proj": torch.zeros(5, 96, 64)}),
            f"lack {MLP}.experts.down_proj",
        ),
    ],
    ids=["missing", "no router", "misshapen", "one too many", "twice"],
)
def test_experts_that_do_not_fit_are_named(directory: Path, change: Callable[..., Any], message: str) -> None:
    edit_weights(directory, change)
    assert message in refusal(directory)


def test_an_expert_that_is_in_two_files_is_named(directory: Path) -> None:
    files = split_up(directory)
    other = next(file for file in sorted(set(files.values())) if file != files[EXPERT])
    tensors = load_file(directory / other)
    save_file(tensors | {EXPERT: torch.zeros(48, 64)}, directory / other, metadata={"format": "pt"})
    message = refusal(directory)
    assert f"{EXPERT} is in both" in message and files[EXPERT] in message and other in message


def test_stacked_experts_of_mixed_layouts_are_refused(directory: Path) -> None:
    stack(directory, transposed=True)
    name = f"{MLP}.experts.down_proj"
    edit_weights(directory, lambda tensors: tensors.update({name: tensors[name].transpose(1, 2).contiguous()}))
    assert f"other shapes for {MLP}.experts.down_proj [5, 64, 48] instead of [5, 48, 64]" in refusal(directory)


def test_a_misshapen_tensor_of_stacked_experts_does_not_change_the_layout_of_the_others(directory: Path) -> None:
    stack(directory, transposed=True)
    edit_weights(directory, lambda tensors: tensors.update({f"{MLP}.experts.gate_up_proj": torch.zeros(5, 64, 90)}))
    message = refusal(directory)
    assert f"other shapes for {MLP}.experts.gate_up_proj [5, 64, 90] instead of [5, 64, 96] in" in message
    assert "down_proj" not in message


def test_entries_of_experts_in_the_config_of_a_dense_model_mean_nothing(tmp_path: Path) -> None:
    directory = save_random_model(tmp_path, "qwen3")
    edit_config(directory, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
    assert load_model(ModelConfig(model=directory, device="cpu")).model.config.experts is None


@pytest.mark.parametrize("overrides", [{"mlp_only_layers": []}, {"decoder_sparse_step": 3}, {}], ids=str)
def test_the_estimate_of_weights_counts_sparse_layers_alone(tmp_path: Path, overrides: dict[str, Any]) -> None:
    directory = save_random_model(tmp_path, "qwen3_moe", **overrides)
    config = AutoConfig.from_pretrained(directory)
    tensors = load_file(directory / "model.safetensors").values()
    assert count_weights("moe", config) == pytest.approx(sum(tensor.numel() for tensor in tensors), rel=0.02)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"num_local_experts": -1}, "num_experts"),
        ({"num_local_experts": "x"}, "num_experts"),
        ({"num_local_experts": 4097}, "num_experts"),
        ({"num_local_experts": [1]}, "num_experts"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window=64"),
    ],
    ids=str,
)
def test_a_config_without_meaning_is_refused(directory: Path, values: dict[str, Any], message: str) -> None:
    edit_config(directory, **values)
    assert message in refusal(directory)


def test_dummy_experts_are_those_of_their_seed(directory: Path) -> None:
    shape = shape_of(directory)
    first, again, other = (dummy_weights(shape, torch.float32, CPU, seed) for seed in (0, 0, 1))
    assert same(first, again) and not same(first, other)


def test_all_experts_count_once_as_weights(directory: Path) -> None:
    loaded = load_model(ModelConfig(model=directory, device="cpu", attention_backend="torch"))
    tensors = load_file(directory / "model.safetensors").values()
    assert loaded.num_parameters == sum(tensor.numel() for tensor in tensors)
    assert loaded.weight_bytes == sum(tensor.nbytes for tensor in tensors)


def test_experts_that_do_not_fit_are_refused_before_they_are_read(directory: Path) -> None:
    edit_config(directory, num_local_experts=2**12, moe_intermediate_size=2**20)
    (directory / "model.safetensors").write_bytes(b"nobody reads this")
    with pytest.raises(ModelLoadError, match=r"they need [\d,.]+ GiB as float32, and .* of cpu memory is available"):
        load_model(ModelConfig(model=directory, device="cpu", attention_backend="torch"))


# --- the trace --------------------------------------------------------------------------------------------------------


def generate(directory: Path, num_tokens: int, *readers: Any, **trace: Any) -> Any:
    """Answer a prompt of five tokens; returns the model."""
    model = ModelConfig(model=directory, device="cpu", attention_backend="torch")
    with LLMEngine(model_config=model, trace_config=TraceConfig(readers=readers, **trace)) as engine:
        engine.generate([5, 6, 7, 8, 9], SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        return engine.engine_core.executor.worker.model_runner.model


def test_the_experts_of_each_step_are_counted(directory: Path) -> None:
    kept, view = Kept(), ExpertMap()
    expert_bytes = generate(directory, 3, kept, view, experts=True).expert_bytes
    used = kept.of(ExpertsUsed)
    assert [each.num_tokens for each in used] == [5, 1, 1]
    for each in used:
        assert (each.layers, each.num_experts, each.top_k) == ((0, 2), 5, 2)
        assert sum(each.loads) == each.num_tokens * 2 * 2
        assert each.read_bytes == sum(load > 0 for load in each.loads) * expert_bytes
    assert expert_bytes == 3 * 48 * 64 * 4
    assert [each.num_read for each in used[1:]] == [4, 4], "one token reads two experts in each of two layers"
    assert [frame.used for frame in view.frames] == used
    (loaded,) = kept.of(ExpertsLoaded)
    assert (loaded.num_layers, loaded.num_sparse_layers, loaded.expert_bytes) == (3, 2, expert_bytes)


def test_the_map_shows_each_layer_with_the_tokens_of_its_experts(directory: Path) -> None:
    view = ExpertMap()
    generate(directory, 2, view, experts=True)
    frame = view.frames[0]
    title, *rows = [str(line) for line in draw(frame, 60).renderables]
    assert title.startswith(f"step 1: 5 tokens used {frame.used.num_read} of 10 experts (")
    for row, (layer, loads) in zip(rows, frame.rows(), strict=True):
        cells = "".join("." if load == 0 else str(load) for load in loads)
        assert row == f"  layer {layer:>3}  {cells}  {sum(load > 0 for load in loads)} read"
    assert frame.unevenness == max(frame.used.loads) / 2


def test_a_step_that_fails_counts_nothing_and_the_next_one_its_own(directory: Path) -> None:
    kept = Kept()
    model = ModelConfig(model=directory, device="cpu", attention_backend="torch")
    with LLMEngine(model_config=model, trace_config=TraceConfig(readers=(kept,), experts=True)) as engine:
        last = engine.engine_core.executor.worker.model_runner.model.layers[-1]
        mlp, last.mlp = last.mlp, lambda hidden: 1 / 0
        assert engine.generate([1, 2, 3], SamplingParams(max_tokens=2)).finish_reason == "error"
        last.mlp = mlp
        engine.generate([5, 6, 7, 8, 9], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [used.num_tokens for used in kept.of(ExpertsUsed)] == [5, 1, 1]


def test_a_worker_of_ones_own_records_no_experts(directory: Path) -> None:
    class Own(GPUWorker):
        def execute_model(self, decision: Any) -> Any:
            return super().execute_model(decision)

    model = ModelConfig(model=directory, device="cpu", attention_backend="torch")
    with pytest.raises(ConfigError, match="no effect on a worker of your own"):
        LLMEngine(model_config=model, trace_config=TraceConfig(experts=True), parts={"worker": Own})


def test_the_demo_draws_the_experts_of_two_steps(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    flags = ["--model", str(directory), "--trace", "off", "--prompt", "Hi", "--max-tokens", "4"]
    assert demo.main(flags) == 0
    assert KEY not in capsys.readouterr().out
    assert demo.main([*flags, "--trace-experts"]) == 0
    out = capsys.readouterr().out
    assert KEY in out and len(re.findall(r"^step \d+: \d+ tokens? used \d+ of 10 experts \(", out, re.MULTILINE)) == 2


def test_the_tour_of_a_model_with_experts_compares_nothing_and_draws_its_map(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert demo.main(["--model", str(directory), "--num-prompts", "2", "--trace-experts"]) == 0
    out = words(capsys.readouterr().out)
    assert "Nothing is compared:" in out and "'Qwen3MoeForCausalLM' is not supported" in out and KEY in out


@pytest.mark.parametrize("package", ["m3_paged_attention", "m4_radix_cache", "m5_chunked_prefill_spec"])
def test_every_demo_refuses_to_record_what_is_not_there(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module(f"{package}.demo").main(["--trace-experts"]) == 2
    assert "ConfigError: TraceConfig(experts=True) records the use of experts" in capsys.readouterr().err


def test_experts_are_not_counted_unless_asked_for(directory: Path) -> None:
    kept = Kept()
    generate(directory, 2, kept)
    assert not kept.of(ExpertsUsed) and kept.of(ExpertsLoaded)


def test_to_count_experts_of_a_model_without_any_is_an_error() -> None:
    with pytest.raises(ConfigError, match="has none"):
        LLMEngine(trace_config=TraceConfig(experts=True))
